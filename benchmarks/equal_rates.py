"""Which part of SO-GRPO helps where learning rates are equal?

    python -m benchmarks.equal_rates              # every run that is not there yet: hours
    python -m benchmarks.equal_rates --columns reuse stale
    python -m benchmarks.equal_rates --report     # only writes the report again
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Sequence

from benchmarks.equal_plan import ARMS, COLUMNS, CHECK, FIRST_RATES, FRESH_SEEDS, GRID, HEADLINE, SEARCH_SEEDS, SEARCHED, SEEDS
from benchmarks.stability import load, run_all
from benchmarks.stability_report import Run
from benchmarks.stability_run import Job
from sorl_trl.command_line import Parser, at_least, run_command


def equal_jobs(columns: Sequence[str], seed: int, follow: bool) -> Iterator[Job]:
    """Of all arms at the learning rate of the column: those that follow another run, or the others."""
    for column in (name for name in columns if seed in SEEDS[name]):
        for arm, method in ARMS.items():
            if bool(method.follows) == follow and (arm != CHECK or seed == FRESH_SEEDS[0]):
                yield Job(column, arm, COLUMNS[column].learning_rate, seed)


def finals(column: str, arm: str) -> dict[float, float]:
    """Learning rate to the mean final EM over the choosing seeds that have all run."""
    found: dict[float, list[float]] = {}
    for job, record in load().items():
        if (job.regime, job.method) == (column, arm) and job.seed in SEARCH_SEEDS:
            found.setdefault(job.learning_rate, []).append(Run(record).final("sampled_em"))
    return {rate: statistics.fmean(each) for rate, each in sorted(found.items()) if len(each) == len(SEARCH_SEEDS)}


def search_jobs(columns: Sequence[str]) -> Iterator[Job]:
    """The first rates of each searched arm, and then the next one beyond an end that is the best."""
    for column in columns:
        for arm in SEARCHED:
            done = finals(column, arm)
            rates = {*FIRST_RATES}
            if rates <= {*done}:
                best = max(done, key=lambda rate: (round(done[rate], 9), -rate))
                at = GRID.index(best)
                rates |= {GRID[i] for i in (at - 1, at + 1) if 0 <= i < len(GRID)}
            for seed in SEARCH_SEEDS:
                yield from (Job(column, arm, rate, seed) for rate in sorted(rates))


def chosen(column: str, arm: str) -> float | None:
    """The best rate on the choosing seeds."""
    done = finals(column, arm)
    return max(done, key=lambda rate: (round(done[rate], 9), -rate)) if done else None


def own_jobs(columns: Sequence[str]) -> Iterator[Job]:
    """The searched arms at their chosen rates."""
    for column in columns:
        for arm in SEARCHED:
            rate = chosen(column, arm)
            if rate is not None:
                yield from (Job(column, arm, rate, seed) for seed in SEEDS[column])


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--search", action="store_true", help="search learning rates and judge the best, nothing else")
    parser.add_argument("--workers", type=at_least(1), default=os.cpu_count() or 1, help="runs at a time")
    arguments = parser.parse_args(words)
    columns, workers = arguments.columns, arguments.workers
    if not arguments.report:
        if not arguments.search:
            for seed in sorted({seed for name in columns for seed in SEEDS[name]}):
                for follow in (False, True):  # what is followed first
                    run_all(equal_jobs(columns, seed, follow), workers, f"Seed {seed}{', yoked' * follow}")
        else:
            searched = [column for column in columns if column in HEADLINE]
            for _ in GRID:
                run_all(search_jobs(searched), workers, "Searching learning rates")
            run_all(own_jobs(searched), workers, "At the chosen learning rates")


if __name__ == "__main__":
    sys.exit(run_command(main))
