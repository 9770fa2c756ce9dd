"""Which trust region holds at any turn length?

    python -m benchmarks.trust_region              # every run of the plan that has no row yet: hours
    python -m benchmarks.trust_region --report     # only writes the table again

Runs the candidates of `trust_plan.py` one after the other, as `benchmarks.stability` runs its methods. Each run adds a
line to `benchmarks/results/trust_region.jsonl`, where the next start goes on, on any machine.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from benchmarks.common import RESULTS, Row, locked, table
from benchmarks.stability import RUNS, in_parallel
from benchmarks.stability_report import Run, rounded
from benchmarks.stability_run import Job, prepare, run
from benchmarks.trust_plan import CHOOSING_SEEDS, COLUMNS, EVERY_METHOD, HEADLINE, VERY_LONG
from sorl_trl.command_line import Parser, at_least, run_command

ROWS = RESULTS / "trust_region.jsonl"
LONG = "turns-of-80-in-3-hops"
FIRST = ("spread2-k15", "spread2", "today", "sequence", "cap-fast", "spread3-k15", "spread2-fast", "spread3", "cap")
"""Are told apart first."""
NEXT = ("spread2-fast", "spread2-mid")
"""Where the rate begins."""
SECOND = ("spread1", "cap8", "cap-turn", "cap-token", "root0.01", "slow", "root0.02", "root0.005", "slow.05")
THIRD = ("root0.01-c.2", "slower.05", "slow.1", "wide.05", "whole.2", "slow-wide", "slow-pass", "c.4", "z1", "at2po")
FOURTH = ("grpo_target", "c.4-stop", "c.2-mask", "c.2-empty")


def plan() -> Iterator[Job]:
    """All runs, the ones that tell most apart first."""
    one, two = CHOOSING_SEEDS[:1], CHOOSING_SEEDS[:2]
    for seed, arm in product(CHOOSING_SEEDS[4:], ("spread2", "spread2-fast", "today", "sequence")):
        yield job("hunt-reuse", arm, seed)
    for factor, seed, arm in product((1, 3), two, ("spread2", "today", "sequence", "spread2-fast")):
        yield job(VERY_LONG, arm, seed, factor)
    for column, seed, arm in product(("sampler-noise", "stale", "long"), two, ("spread2", "today", "sequence")):
        yield job(column, arm, seed)
    narrow = ("spread0.5", "spread0.25", "spread1")
    for seed, arm in product(CHOOSING_SEEDS[:4], narrow):
        yield job("hunt-reuse", arm, seed)
    for factor, arm, seed in product((1, 3), narrow, two):
        yield from (job(column, arm, seed, factor) for column in (LONG, "hot"))
    for factor, arm, seed in product((1, 3), ("spread2", "sequence"), two):
        yield job("hot", arm, seed, factor)
    for seed, arm in product(two_of(0), NEXT):
        yield from (job(LONG, arm, seed, factor) for factor in (1, 3))
    for seed, arm in product(CHOOSING_SEEDS[:4], NEXT):
        yield job("hunt-reuse", arm, seed)
    for factor, seed, arm in product((1, 3), two, ("spread2", "today", "sequence", "spread2-mid")):
        yield job(VERY_LONG, arm, seed, factor)
    for seed, arm in product(two_of(1), (*NEXT, "spread2", "sequence", "today")):
        yield from (job(LONG, arm, seed, factor) for factor in (1, 3))
    for seed, arm in product(CHOOSING_SEEDS[:4], FIRST):
        yield job("hunt-reuse", arm, seed)
    for arm in FIRST:
        for factor in (1, 3):
            yield from (job(column, arm, one[0], factor) for column in ("hot", "reuse"))
            yield from (job(LONG, arm, seed, factor) for seed in two)
    for arm, rate, seed in product(("gspo_plain", "plain"), (3e-5, 1e-4), two):
        yield Job(LONG, arm, rate, seed)
    for arm in SECOND:
        for factor in (1, 3):
            yield from (job(column, arm, one[0], factor) for column in ("hot", "reuse"))
            yield from (job(LONG, arm, seed, factor) for seed in two)
    for column, arm, seed in product(HEADLINE, FIRST, two):
        yield job(column, arm, seed)
    for arm, factor, seed in product((*THIRD, *FOURTH), (1, 3), two):
        yield job(LONG, arm, seed, factor)
    for column, arm, seed in product(("sampler-noise", "sampler-bfloat16", "turns-of-40-in-3-hops"), FIRST, two):
        yield job(column, arm, seed)


def two_of(pair: int) -> tuple[int, ...]:
    return CHOOSING_SEEDS[2 * pair : 2 * pair + 2]


def job(column: str, arm: str, seed: int, factor: float = 1) -> Job:
    """A run at a multiple of the column's learning rate."""
    return Job(column, arm, rounded(factor * COLUMNS[column].learning_rate), seed)


def load() -> dict[Job, Row]:
    lines = ROWS.read_text().splitlines() if ROWS.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {Job(row["column"], row["arm"], row["rate"], row["seed"]): row for row in rows}


def make(job: Job) -> None:
    """Run, and add the row. One process at a time makes a world and its policy."""
    world = COLUMNS[job.regime].world
    with locked(RUNS / f"{world.name}.lock"):
        prepare(world, job.seed, RUNS)
    row = json.dumps(row_of(run(job, RUNS)), allow_nan=False, separators=(",", ":"))
    with ROWS.open("a") as file:
        file.write(row + "\n")


def row_of(record: dict[str, Any]) -> Row:
    made = Run(record)
    kls, stopped = made.metric("kl_to_old max"), made.metric("updates_stopped")
    return {
        "column": record["regime"],
        "arm": record["method"],
        "rate": rounded(record["learning_rate"]),
        "seed": record["seed"],
        "start": round(made.start, 4),
        "final": round(made.final("sampled_em"), 4),
        "greedy": round(made.final("greedy_em"), 4),
        "collapsed": made.collapsed,
        "kl_max": max(kls, default=None),
        "stopped": round(statistics.fmean(stopped), 3) if stopped else None,
        "rates": [float(f"{each:.3g}") for each in made.rates],
        "seconds": record["seconds"],
        "curve": [round(each["sampled_em"], 3) for each in record["evaluations"]],
    }


HEADER = """# Candidates for a trust region

Written by `python -m benchmarks.trust_region` from every run that it has made, those that lost as well: seeds 101 to
108 choose, and judge nothing. A score is the sampled exact match in an unseen world, the mean of the last five
evaluations; start is that of the policy before training. "Stopped" is the share of updates that left the policy alone,
and the mean rate is over all updates. [What they say so far](choosing.md#a-trust-region-for-any-turn-length).

"""


def report(rows: Sequence[Row]) -> str:
    """A line per column, rate and arm."""
    cells: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["column"], row["rate"], row["arm"]), []).append(row)
    order = [*COLUMNS]
    lines = []
    for (column, rate, arm), of in sorted(cells.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        finals = " ".join(f"{each['seed']}: {each['final']:.3f}" for each in of)
        stopped = [each["stopped"] for each in of if each["stopped"] is not None]
        lines.append(
            [
                *(COLUMNS[column].title, f"{rate:g}", EVERY_METHOD[arm].title),
                f"{statistics.fmean(each['final'] for each in of):.3f}",
                f"{statistics.fmean(each['start'] for each in of):.3f}",
                f"{sum(each['collapsed'] for each in of)} of {len(of)}",
                f"{statistics.fmean(stopped):.2f}" if stopped else "–",
                f"{statistics.fmean(each['rates'][0] for each in of):.1e}",
                f"{statistics.fmean(each['seconds'] for each in of):.0f}",
                finals,
            ]
        )
    names = ["", "rate", "arm", "final", "start", "collapsed", "stopped", "mean rate", "CPU seconds", "seeds"]
    return table(names, lines, 3)


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--workers", type=at_least(1), default=1, help="runs at a time")
    parser.add_argument("--most", type=at_least(1), default=10**6, help="stop after so many runs")
    arguments = parser.parse_args(words)
    if not arguments.report:
        RUNS.mkdir(parents=True, exist_ok=True)
        todo = [each for each in dict.fromkeys(plan()) if each not in load()][: arguments.most]
        in_parallel(make, [(each,) for each in todo], arguments.workers, "Candidates")
    (RESULTS / "trust_region.md").write_text(HEADER + report([*load().values()]))
    print(f"The report is in {RESULTS / 'trust_region.md'}.")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(run_command(main))
