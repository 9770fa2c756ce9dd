"""How far does a unit's ratio move, the more tokens it averages over?

    python -m benchmarks.ratio_spread                                  # five minutes
    python -m benchmarks.ratio_spread --regimes hunt-reuse --rollouts 3

Trains with token ratios (`SOGRPOTrainer`, level "token") on the first choosing seed, in rollouts of 32 updates, and
looks at the log-ratios of the tokens in each update. Of windows of n trained tokens in a row, cut from each
trajectory, it takes the mean log-ratio: the logarithm of a geometric mean over n tokens, and the distance from 0 that
nine windows in ten keep (`reach`). Were it to fall as n^-p, a clip range that narrows by the same power would be left
equally often at every n; p is that of a line through the logarithms, and negative where means of more tokens move
farther. Windows and not turns, because turns of different lengths also say different things. Writes
`benchmarks/results/ratio_spread.json` and the table `ratio_spread.md`.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import stability
from benchmarks.stability_grid import CHOOSING_SEEDS, REGIMES
from benchmarks.stability_methods import GRPO_IN_OURS
from benchmarks.stability_run import METHODS, Job, build_trainer, prepare
from benchmarks.stability_run import REGIMES as RUNNABLE
from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.trainers.loss.micro_batch import MicroBatch

RESULT = Path(__file__).parent / "results/ratio_spread.json"
REUSED = ("reuse", "hunt-reuse", "working-reuse")
RATES = (1e-4, 3e-4)
"""In four rollouts token ratios stand both. At 1e-3 they collapse, and then every token moves."""
NAME = "spread"
"""Of the method and of its regime in the benchmark's tables, for the time of this command."""
KEPT = 0.9
WINDOWS = tuple(2**i for i in range(10))
FEWEST = 100
"""Windows of a length without which nothing is said of it."""
AGES = ((1, 1), (2, 8), (9, 32))
"""Updates since the rollout, from and to."""


class SpreadObserver:
    """Collects the log-ratios of each trajectory's trained tokens, by the updates made since it was sampled."""

    def __init__(self) -> None:
        self.log_ratios: dict[int, list[list[float]]] = defaultdict(list)

    def observe(self, batch: MicroBatch) -> None:
        if batch.is_training and batch.age:
            rows = zip(batch.log_ratio.detach(), batch.turns.loss_mask, strict=True)
            self.log_ratios[batch.age] += [row[mask].tolist() for row, mask in rows]


def window_means(log_ratios: Iterable[Sequence[float]], length: int) -> list[float]:
    """The mean over each window of `length` in a row, which do not overlap."""
    return [
        statistics.fmean(row[start : start + length])
        for row in log_ratios
        for start in range(0, len(row) - length + 1, length)
    ]


def reach(values: Sequence[float]) -> float:
    """The distance from 0 that the share `KEPT` of the values keeps."""
    return sorted(map(abs, values))[math.ceil(KEPT * len(values)) - 1]


def slope(points: Mapping[int, float]) -> float | None:
    """−p of the line through log n and log reach, by least squares; `None` of one point or of a reach of 0."""
    if len(points) < 2 or not all(points.values()):
        return None
    line = statistics.linear_regression([math.log(n) for n in points], [math.log(value) for value in points.values()])
    return line.slope


def measure(regime: str, rate: float, rollouts: int, folder: Path) -> Iterable[dict[str, Any]]:
    """A row for each of `AGES`: regime, rate, updates, `reach` by window, `p`, and the mean log-ratio of a token."""
    torch.set_num_threads(1)
    RUNNABLE[NAME] = replace(REGIMES[regime], rollouts=rollouts)
    METHODS[NAME] = GRPO_IN_OURS
    job = Job(NAME, NAME, rate, CHOOSING_SEEDS[0])
    with TemporaryDirectory() as output:
        trainer = build_trainer(job, prepare(REGIMES[regime].world, job.seed, folder), Path(output))
        observer = SpreadObserver()
        trainer._observers.append(observer)
        trainer.train()
    for first, last in AGES:
        rows = [row for age in range(first, last + 1) for row in observer.log_ratios.get(age, [])]
        means = {n: window_means(rows, n) for n in WINDOWS}
        reaches = {n: reach(values) for n, values in means.items() if len(values) >= FEWEST}
        yield {
            "regime": regime,
            "learning_rate": rate,
            "updates": [first, last],
            "reach": {str(n): float(f"{value:.3g}") for n, value in reaches.items()},
            "p": None if (found := slope(reaches)) is None else round(-found, 2),
            "mean_log_ratio": float(f"{statistics.fmean(means[1]):.2g}") if means[1] else None,
        }


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lengths = [str(n) for n in WINDOWS if any(str(n) in row["reach"] for row in rows)]
    header = ["regime", "learning rate", "updates since the rollout", *lengths, "p", "mean"]
    lines = [
        "# How far a mean over n tokens moves",
        "",
        (__doc__ or "").partition("\n\n")[2].strip("\n"),
        "",
        "Columns of numbers: `reach` of windows of so many tokens. Mean: of a token's log-ratio.",
        "",
        "| " + " | ".join(header) + " |",
        "|---" * len(header) + "|",
    ]
    for row in rows:
        first, last = row["updates"]
        reaches = [f"{row['reach'][n]:g}" if n in row["reach"] else "" for n in lengths]
        updates = f"{first}" if first == last else f"{first} to {last}"
        cells = [row["regime"], f"{row['learning_rate']:g}", updates, *reaches]
        power = "–" if row["p"] is None else f"**{row['p']:.2f}**"
        mean = "–" if row["mean_log_ratio"] is None else f"{row['mean_log_ratio']:g}"
        lines.append("| " + " | ".join([*cells, power, mean]) + " |")
    return "\n".join(lines) + "\n"


def parse_arguments(words: Sequence[str] | None) -> Namespace:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=REUSED)
    parser.add_argument("--rollouts", type=at_least(1), default=4, help="per regime and learning rate")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(words)
    stability.RUNS.mkdir(parents=True, exist_ok=True)
    rows = [
        row
        for regime in arguments.regimes
        for rate in RATES
        for row in measure(regime, rate, arguments.rollouts, stability.RUNS)
    ]
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")
    text = format_table(rows)
    RESULT.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    sys.exit(run_command(main))
