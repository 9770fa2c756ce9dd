"""What looked for better defaults: settings tried on the choosing seeds alone, in every world.

    python -m benchmarks.stability_trials                                   # all of them: hours; goes on where it was
    python -m benchmarks.stability_trials --regimes hunt-reuse --methods grpo turn_length
    python -m benchmarks.stability_trials --common                          # at each regime's common rate alone
    python -m benchmarks.stability_trials --report                          # only writes the table again

Methods are those of `stability_methods.py` and `trial_methods.py`, at every learning rate of their regime. Runs are
kept as those of `benchmarks.stability` are: in `runs/stability`, and in short in
`benchmarks/results/stability_trials.jsonl.xz`. Writes `benchmarks/results/stability_trials.md`.
"""

from __future__ import annotations

import os
import statistics
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from benchmarks import stability
from benchmarks.stability_grid import CHOOSING_SEEDS, CORE, REGIMES
from benchmarks.stability_methods import METHODS
from benchmarks.stability_report import harness_marks
from benchmarks.stability_run import Job
from benchmarks.stability_statistics import Run
from benchmarks.trial_methods import TRIALS
from sorl_trl.command_line import Parser, at_least, run_command

ARCHIVE = stability.RESULTS / "stability_trials.jsonl.xz"
TABLE = stability.RESULTS / "stability_trials.md"
COMPARED = tuple(name for name in CORE if METHODS[name].family == "grpo")
"""Of `METHODS`, beside every trial."""
HEADER = """# What looked for better defaults

Written by `python -m benchmarks.stability_trials`. Final sampled EM and, in brackets, greedy EM: means over the
choosing seeds {seeds}, which enter no table of results on judging seeds. A figure from one seed alone is followed by
"(one)", and "x" marks a cell in which a run collapsed. ¹, ² and ³ say with which harness the runs were made: their
evaluations draw other random numbers, and one may read higher than another for all methods ([defaults](defaults.md)),
so that figures of the same mark compare. Where a row has several learning rates, the best is bold, of those that were
tried on most seeds; † marks one at the end of the row's rates, so that a better one may lie beyond it.
"""


def jobs(
    regimes: Sequence[str], methods: Sequence[str], seeds: Sequence[int], common_rate: bool = False
) -> Iterator[Job]:
    """Every method at every learning rate of every regime, or at the common one; the first seed first."""
    for seed, regime, method in product(seeds, regimes, methods):
        own = () if common_rate else REGIMES[regime].learning_rates
        rates = own or (REGIMES[regime].learning_rate,)
        yield from (Job(regime, method, rate, seed) for rate in rates)


def load() -> list[dict[str, Any]]:
    """The runs of choosing seeds that are in the archive or in `runs/stability`, made with today's settings."""
    found = [*stability.read_archive(stability.ARCHIVE), *stability.read_all(ARCHIVE)]
    records = {stability.key(record): record for record in found if is_current(record)}
    return [records[job] for job in sorted(records, key=str)]


def is_current(record: Mapping[str, Any]) -> bool:
    job = stability.key(dict(record))
    known = job.regime in REGIMES and (job.method in METHODS or job.method in TRIALS)
    return known and job.seed in CHOOSING_SEEDS and stability.is_made_as(record, job)


def format_tables(records: Sequence[Mapping[str, Any]]) -> str:
    """A table per regime: methods, and learning rates ascending."""
    runs = [Run(record) for record in records]
    lines = [HEADER.format(seeds=", ".join(map(str, CHOOSING_SEEDS)))]
    for regime in REGIMES:
        cells: dict[tuple[str, float], list[Run]] = defaultdict(list)
        for each in runs:
            if each.cell[0] == regime:
                cells[each.cell[1:]].append(each)
        if cells:
            lines += [f"## {REGIMES[regime].title}", "", *_table(cells), ""]
    return "\n".join(lines)


def _table(cells: Mapping[tuple[str, float], Sequence[Run]]) -> Iterator[str]:
    rates = sorted({rate for _, rate in cells})
    yield "| method | " + " | ".join(f"{rate:g}" for rate in rates) + " |"
    yield "|---" * (1 + len(rates)) + "|"
    for method in (name for name in (*METHODS, *TRIALS) if any((name, rate) in cells for rate in rates)):
        means = {rate: _mean(cells[method, rate], "sampled_em") for rate in rates if (method, rate) in cells}
        best = max(means, key=lambda rate: (len(cells[method, rate]), means[rate])) if len(means) > 1 else None
        mark = "†" if best in (min(means), max(means)) else ""
        shown = (_cell(cells.get((method, rate), ()), mark if rate == best else None) for rate in rates)
        yield f"| {(METHODS | TRIALS)[method].title} | " + " | ".join(shown) + " |"


def _mean(runs: Sequence[Run], score: str) -> float:
    return statistics.fmean(run.final(score) for run in runs)


def _cell(runs: Sequence[Run], mark_of_best: str | None) -> str:
    """`mark_of_best` is None where the runs are not the best of their row."""
    if not runs:
        return ""
    text = f"{_mean(runs, 'sampled_em'):.2f} ({_mean(runs, 'greedy_em'):.2f})"
    collapsed = " x" if any(run.collapsed for run in runs) else ""
    shown = text if mark_of_best is None else f"**{text}**{mark_of_best}"
    return shown + harness_marks({run.harness for run in runs}) + (" (one)" if len(runs) == 1 else "") + collapsed


def parse_arguments(words: Sequence[str] | None) -> Namespace:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--methods", nargs="+", choices=(*METHODS, *TRIALS), default=(*COMPARED, *TRIALS))
    parser.add_argument("--seeds", type=int, nargs="+", choices=CHOOSING_SEEDS, default=CHOOSING_SEEDS)
    parser.add_argument("--common", action="store_true", help="at the common learning rate of each regime alone")
    parser.add_argument("--workers", type=at_least(1), default=os.cpu_count() or 1, help="runs at a time")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(words)
    if not arguments.report:
        done = set(map(stability.key, load()))
        wanted = jobs(arguments.regimes, arguments.methods, arguments.seeds, arguments.common)
        stability.run_missing(wanted, done, arguments.workers, "Trials")
    records = load()
    elsewhere = set(map(stability.key, stability.read_archive(stability.ARCHIVE)))
    stability.save([record for record in records if stability.key(record) not in elsewhere], ARCHIVE)
    TABLE.write_text(format_tables(records))
    print(f"The tables are in {TABLE}.")


if __name__ == "__main__":
    sys.exit(run_command(main))
