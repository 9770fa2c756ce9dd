"""What does it do to a run that collapses to go back, or to go slower? And against a target KL?

    python -m benchmarks.guard_actions            # an hour; it goes on where it was interrupted
    python -m benchmarks.guard_actions --report   # only writes the tables again

Runs token ratios, which collapse there, in two regimes of 32 updates per rollout at their common learning rate, on
the judging seeds: without a guard (TRL's trainer), with one that halves the learning rate (`lower_lr`), with one that
also goes back to the newest healthy checkpoint (`roll_back`), both with `CollapseGuard`'s own rules and settings and a
checkpoint after every rollout; and without a guard but with a target KL. A guard may also stop: the EM of such a run
is that of the policy that it left. ¹, ² and ³ name the harness, as in `stability.md`; runs are paired by seed where
they have the same one. They are kept in `runs/stability` and in `benchmarks/results/guard_actions.jsonl.xz`. Writes
`benchmarks/results/guard_actions.md`.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from benchmarks import stability
from benchmarks.seed_statistics import paired
from benchmarks.stability_grid import JUDGING_SEEDS, REGIMES
from benchmarks.stability_report import harness_marks
from benchmarks.stability_run import METHODS, Job
from benchmarks.stability_statistics import Run, mean_final
from sorl_trl.command_line import Parser, at_least, run_command

ARCHIVE = stability.RESULTS / "guard_actions.jsonl.xz"
TABLE = stability.RESULTS / "guard_actions.md"
DRIVEN = ("reuse", "hunt-reuse")
"""Two of the regimes in which GRPO collapses at the common learning rate."""
NOTHING = "grpo"
COMPARED = (NOTHING, "grpo_lower_lr", "grpo_roll_back", "grpo_target")


def jobs(regimes: Sequence[str] = DRIVEN, methods: Sequence[str] = COMPARED) -> Iterator[Job]:
    for seed, regime, method in product(JUDGING_SEEDS, regimes, methods):
        yield Job(regime, method, REGIMES[regime].learning_rate, seed)


def load() -> dict[Job, dict[str, Any]]:
    """The runs that count, from all archives and `runs/stability`."""
    found = [*stability.read_archive(stability.ARCHIVE), *stability.read_all(ARCHIVE)]
    wanted = set(jobs())
    of_jobs = ((stability.key(record), record) for record in found)
    return {job: record for job, record in of_jobs if job in wanted and stability.is_made_as(record, job)}


def format_tables(records: Mapping[Job, Mapping[str, Any]]) -> str:
    lines = ["# What a guard's actions are worth", "", (__doc__ or "").strip(), ""]
    for regime in DRIVEN:
        runs = {
            method: [Run(records[job]) for job in jobs([regime], [method]) if job in records] for method in COMPARED
        }
        lines += [f"## {REGIMES[regime].title}", "", *_table(runs), ""]
    return "\n".join(lines)


def _table(runs: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    yield "| | final sampled EM | greedy | collapsed | stopped | more sampled EM than without a guard, 95 % (pairs) |"
    yield "|---|---|---|---|---|---|"
    for method, of_method in runs.items():
        if of_method:
            sampled, greedy = (mean_final(of_method, score) for score in ("sampled_em", "greedy_em"))
            collapsed = f"{sum(run.collapsed for run in of_method)} of {len(of_method)}"
            gain = "" if method == NOTHING else _gain(paired(of_method, runs[NOTHING]))
            stopped = sum(run.stopped_at is not None for run in of_method)
            sampled_em = f"{sampled:.3f}{harness_marks({run.harness for run in of_method})}"
            yield f"| {METHODS[method].title} | {sampled_em} | {greedy:.3f} | {collapsed} | {stopped} | {gain} |"


def _gain(pair: Mapping[str, Any] | None) -> str:
    if pair is None or pair["interval"] is None:
        return ""
    low, high = pair["interval"]
    return f"{pair['mean']:+.3f} [{low:+.3f}, {high:+.3f}] ({len(pair['seeds'])})"


def parse_arguments(words: Sequence[str] | None) -> Namespace:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--workers", type=at_least(1), default=os.cpu_count() or 1, help="runs at a time")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(words)
    if not arguments.report:
        stability.run_missing(jobs(), load(), arguments.workers, "Driven into collapse")
    records = load()
    elsewhere = set(map(stability.key, stability.read_archive(stability.ARCHIVE)))
    stability.save([record for job, record in records.items() if job not in elsewhere], ARCHIVE)
    TABLE.write_text(format_tables(records))
    print(TABLE.read_text())


if __name__ == "__main__":
    sys.exit(run_command(main))
