"""Is training stable at any turn length?

    python -m benchmarks.stability                  # every run of the plan that has no row yet: hours
    python -m benchmarks.stability --most 100       # so many of them
    python -m benchmarks.stability --report         # only writes the tables again

Runs the arms of `stability_plan.py` in its columns through the real trainers: first the search of constant learning
rates, then the seeds that judge. Each run adds a line to `benchmarks/results/stability.jsonl`, where the next start
goes on, on any machine. What a run logs of every update stays in `runs/stability/`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("PYTHONWARNINGS", "ignore")
# Keep freed memory: asking for it anew takes a tenth of a run's time.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**33))

from tqdm.auto import tqdm

from benchmarks.common import RESULTS, Row, locked, read_lines
from benchmarks.stability_plan import (
    ARMS,
    CHOOSING_SEEDS,
    COLUMNS,
    COLUMNS_WITH_CRITIC,
    FIRST_RATES,
    FOLLOWING,
    GRID,
    JUDGING_SEEDS,
    SEARCHED,
    WITH_CRITIC,
    searched_in,
)
from benchmarks.stability_report import best_rate, rate_of, report, row_of, searched
from benchmarks.stability_run import Job, prepare, run
from sorl_trl.command_line import Parser, at_least, run_command

RUNS = Path(__file__).parents[1] / "runs/stability"
ROWS = RESULTS / "stability.jsonl"


def plan(rows: Sequence[Row]) -> Iterator[Job]:
    """The runs of the next stage: those of the first half of the seeds, the search, those that check, and the rest.

    A stage of the search follows the one before, so a plan is made anew until nothing of it is left to run.
    """
    half = len(JUDGING_SEEDS) // 2
    yield from following(JUDGING_SEEDS[:half])
    yield from search(rows)
    for seed, column, arm in product(JUDGING_SEEDS, COLUMNS, SEARCHED):
        if column == searched_in(column) and (rate := rate_of(rows, column, arm)) is not None:
            yield Job(column, arm, rate, seed)
    yield from following(JUDGING_SEEDS[half:])
    yield from (job(column, "yoked", JUDGING_SEEDS[0]) for column in COLUMNS)


def following(seeds: Sequence[int]) -> Iterator[Job]:
    """Arms at the column's learning rate."""
    for seed in seeds:
        yield from (job(column, arm, seed) for column, arm in product(COLUMNS, FOLLOWING))
        yield from (job(column, arm, seed) for column, arm in product(COLUMNS_WITH_CRITIC, WITH_CRITIC))


def search(rows: Sequence[Row]) -> Iterator[Job]:
    """The first rates of each searched arm, and the next one beyond an end that is the best so far."""
    for column, arm in product((name for name in COLUMNS if name == searched_in(name)), SEARCHED):
        scores, rates = searched(rows, column, arm), {*FIRST_RATES}
        if rates <= {*scores}:
            at = GRID.index(best_rate(scores))
            rates |= {GRID[i] for i in (at - 1, at + 1) if 0 <= i < len(GRID)}
        yield from (Job(column, arm, rate, seed) for rate in sorted(rates) for seed in CHOOSING_SEEDS)


def job(column: str, arm: str, seed: int) -> Job:
    return Job(column, arm, float(f"{COLUMNS[column].learning_rate:.3g}"), seed)


def load() -> list[Row]:
    return sorted({key(row): row for row in read_lines(ROWS)}.values(), key=lambda row: row["seed"])


def key(row: Row) -> Job:
    return Job(row["column"], row["arm"], row["rate"], row["seed"])


def make(each: Job) -> None:
    """Run, and add the row. What it follows is run first, unless this machine has done so."""
    world = COLUMNS[each.column].world
    with locked(RUNS / f"{world.name}.lock"):  # one process at a time makes a world and its policy
        prepare(world, each.seed, RUNS)
    followed = Job(each.column, ARMS[each.arm].follows, each.rate, each.seed)
    if followed.arm and not (RUNS / followed.name / "record.json").is_file():
        run(followed, RUNS)
    row = json.dumps(row_of(run(each, RUNS)), allow_nan=False, separators=(",", ":"))
    with ROWS.open("a") as file:
        file.write(row + "\n")


def silence() -> None:
    """Of a worker, whose output nobody reads; its errors are raised in the parent."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)


def in_parallel(step: Callable[..., Any], calls: Sequence[tuple[Any, ...]], workers: int, title: str) -> None:
    """`step` of each of the calls' arguments, in processes of one thread."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), silence) as pool:
        for _ in tqdm(pool.map(step, *zip(*calls, strict=True)), total=len(calls), unit="run", desc=title):
            pass


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--workers", type=at_least(1), default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--most", type=at_least(1), default=10**6, help="stop after so many runs")
    arguments = parser.parse_args(words)
    left = 0 if arguments.report else arguments.most
    RUNS.mkdir(parents=True, exist_ok=True)
    while left:
        rows = load()
        done = {*map(key, rows)}
        todo = [each for each in dict.fromkeys(plan(rows)) if each not in done][:left]
        if not todo:
            break
        in_parallel(make, [(each,) for each in todo], arguments.workers, "Runs")
        left -= len(todo)
    (RESULTS / "stability.md").write_text(report(load()))
    print(f"The report is in {RESULTS / 'stability.md'}.")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(run_command(main))
