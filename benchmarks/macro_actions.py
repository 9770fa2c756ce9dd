"""Does PPO learn faster if its time steps are macro actions of several tokens, as MA-RLHF claims?

    python -m benchmarks.macro_actions --prepare         # only worlds and policies
    python -m benchmarks.macro_actions --processes 16    # what is not there yet, and the report
    python -m benchmarks.macro_actions --report          # only the report

`ma_rlhf` (token ratios, λ = .95) in questions of three hops, with turns of about 40 tokens. Arms differ in their time
steps alone. Each run has one thread and writes one file into `runs/macro_actions/`, a folder that can be carried to
another machine; runs that are there are not repeated. Writes `benchmarks/results/macro_actions.json` and `.md`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, Row, table, write_rows
from benchmarks.stability import in_parallel
from benchmarks.stability_plan import NO_PIECES, BenchmarkMethod, Regime
from benchmarks.stability_run import evaluations_of, prepare, summarize_rollouts, trainer_of
from benchmarks.worlds.working import WorkingWorld
from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.files import write_whole
from sorl_trl.methods import SETTINGS

FOLDER = Path(__file__).parents[1] / "runs/macro_actions"
SEEDS = (201, 205, 209, 213, 217)
"""Each has its own world and its own policy."""
WORLD, RATE = WorkingWorld(40), 3e-4
REGIME = Regime("Macro actions", "", RATE, world=WORLD, trajectories=48, minibatch=12, rollouts=14)
LAST = 5
"""Rollouts at the end, whose means are in the table."""
THRESHOLD, SMOOTHED = 0.6, 3
"""Of the sampled exact match in training, as the mean over so many rollouts."""
MACRO, TURN = {"advantage_level": "macro"}, {"advantage_level": "turn", "macro_action_tokens": None}
ARMS: dict[str, Row] = {
    **{f"{tokens}": {**MACRO, "macro_action_tokens": tokens, "value_pool": "first"} for tokens in (1, 3, 5)},
    "turn": {**TURN, "value_pool": "first"},
    **{f"{tokens}, mean": {**MACRO, "macro_action_tokens": tokens, "value_pool": "mean"} for tokens in (3, 5)},
    "turn, mean": {**TURN, "value_pool": "mean"},
}
"""Title to time steps."""
COLUMNS = ("start", "sampled_em", "greedy_em", "value_loss", "explained_variance", "updates")
HEADER = f"""# Macro actions: what is a time step of PPO?

Written by `python -m benchmarks.macro_actions`: `ma_rlhf` with macro actions of 1, 3 and 5 tokens, and with whole
turns, of about 40 tokens; {REGIME.rollouts} rollouts of {REGIME.updates} updates each, the first of which trains the
critic alone. Mean ± standard error over {len(SEEDS)} seeds, each with a policy of its own. *Start* is the sampled
exact match before training. *Sampled* and *greedy* are exact match in an unseen world, *value loss* and *explained
variance* are the critic's, all as means over the last {LAST} rollouts. *Updates* is how many were made before the
sampled exact match in training, as the mean over {SMOOTHED} rollouts, was at least {THRESHOLD}; a run that never came
there counts as {REGIME.rollouts * REGIME.updates}. Arms value other states, and other returns, so that the critic's
two columns do not compare critics. "Mean" marks arms with `value_pool="mean"`; the others have "first"."""


def file_of(arm: str, seed: int) -> Path:
    return FOLDER / f"{arm.replace(', ', '-')}-{seed}.json"


def run(arm: str, seed: int) -> None:
    """Train and evaluate, and write the file of the run."""
    world, started = prepare(WORLD, seed, FOLDER), time.process_time()
    method = BenchmarkMethod(arm, "so_ppo", SETTINGS["ma_rlhf"] | ARMS[arm], NO_PIECES)
    with tempfile.TemporaryDirectory() as output:
        own = {"output_dir": output, "seed": seed, "learning_rate": RATE, "log_turn_details": True}
        trainer = trainer_of(REGIME, method, world, own)
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    rollouts: list[Any] = summarize_rollouts(log, REGIME.updates)
    curve: list[Any] = evaluations_of(trainer)
    training = [each["reward"] for each in rollouts]
    smooth = [statistics.fmean(training[i : i + SMOOTHED]) for i in range(len(training) - SMOOTHED + 1)]
    until = next((i for i, each in enumerate(smooth, SMOOTHED - 1) if each >= THRESHOLD), REGIME.rollouts)
    late = {name: statistics.fmean(row[name] for row in curve[-LAST:]) for name in ("sampled_em", "greedy_em")}
    for name in ("value_loss", "explained_variance"):  # undefined where all returns are equal
        known = [value for row in rollouts[-LAST:] if (value := row[f"critic/{name}"]) is not None]
        late[name] = statistics.fmean(known) if known else None
    found = {"arm": arm, "seed": seed, "start": curve[0]["sampled_em"], **late, "updates": until * REGIME.updates}
    found |= {"training": training, "seconds": round(time.process_time() - started, 1)}
    write_whole(file_of(arm, seed), json.dumps(found).encode())


def report(rows: Sequence[Row]) -> str:
    """`macro_actions.md`."""
    means, each = [], []
    for arm in ARMS:
        of_arm = [row for row in rows if row["arm"] == arm]
        if len(of_arm) > 1:
            columns = [[row[name] for row in of_arm if row[name] is not None] for name in COLUMNS]
            errors = [statistics.stdev(column) / len(column) ** 0.5 for column in columns]
            cells = [f"{statistics.fmean(x):.3g} ± {error:.2g}" for x, error in zip(columns, errors, strict=True)]
            means.append([arm, *cells])
        each += [
            [arm, str(row["seed"]), *("–" if row[name] is None else f"{row[name]:.3g}" for name in COLUMNS)]
            for row in of_arm
        ]
    titles = ["start", "sampled", "greedy", "value loss", "explained variance", "updates"]
    tables = table(["tokens", *titles], means, 1), table(["tokens", "seed", *titles], each, 1)
    return "\n\n".join([HEADER, tables[0].strip(), "## Every seed", tables[1].strip()]) + "\n"


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prepare", action="store_true", help="only make worlds and policies")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--processes", type=at_least(1), default=os.cpu_count() or 1, help="runs at a time")
    arguments = parser.parse_args(words)
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        calls = [(WORLD, seed, FOLDER) for seed in SEEDS]
        in_parallel(prepare, calls, min(arguments.processes, len(calls)), "Worlds and policies")
    jobs = [*product(SEEDS, ARMS)]
    todo = [(arm, seed) for seed, arm in jobs if not file_of(arm, seed).is_file()]
    if todo and not (arguments.prepare or arguments.report):
        in_parallel(run, todo, arguments.processes, "Runs")
    if not arguments.prepare:
        files = [file for seed, arm in jobs if (file := file_of(arm, seed)).is_file()]
        rows = [json.loads(file.read_text()) for file in files]
        write_rows(rows, RESULTS / "macro_actions.json")
        (RESULTS / "macro_actions.md").write_text(report(rows))


if __name__ == "__main__":
    sys.exit(run_command(main))
