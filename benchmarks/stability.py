"""Does turn-level training hold where token-level training collapses?

    python -m benchmarks.stability                                             # everything: hours
    python -m benchmarks.stability --regimes reuse --methods grpo so_grpo      # some of it
    python -m benchmarks.stability --report   # only writes the report again

Runs every method of `stability_methods.py` in every regime of `stability_grid.py` through the real trainers, in
processes of one thread. Runs are kept in `runs/stability/`, each with its metrics of every update (`log.jsonl`), and
those that are there are not repeated.

Order: the judging seeds at the common learning rate, the choosing seeds on the grid of learning rates, then the
judging seeds at each method's own best. Writes `benchmarks/results/stability.json` and `.md`, in which the rows of new
runs replace those of earlier ones.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")
# Keep freed memory: asking for it anew takes a tenth of a run's time.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**33))

from tqdm.auto import tqdm

from benchmarks.rows import read_rows
from benchmarks.stability_grid import CHOOSING_SEEDS, JUDGING_SEEDS, REGIMES
from benchmarks.stability_methods import METHODS
from benchmarks.stability_report import choose, write_report
from benchmarks.stability_run import REGIMES as ALL_REGIMES
from benchmarks.stability_run import Job, prepare, run, settings_of
from benchmarks.stability_statistics import Record, Run, choosing_plan
from sorl_trl.command_line import Parser, at_least, run_command

RUNS = Path(__file__).parents[1] / "runs/stability"
RESULTS = Path(__file__).parent / "results"


def judging_jobs(regimes: Sequence[str], methods: Sequence[str]) -> Iterator[Job]:
    """The runs at the common learning rate, of the methods that a regime has."""
    for seed in JUDGING_SEEDS:
        for regime in regimes:
            for method in filter(REGIMES[regime].methods.__contains__, methods):
                yield Job(regime, method, REGIMES[regime].learning_rate, seed)


def choosing_jobs(regimes: Sequence[str], methods: Sequence[str], records: Iterable[Record]) -> Iterator[Job]:
    """The choosing runs that are needed, as far as `records` tell."""
    runs = [*map(Run, records)]
    for regime in regimes:
        rates = REGIMES[regime].learning_rates
        for method in (each for each in methods if METHODS[each].tuned and each in REGIMES[regime].methods):
            for rate, seed in choosing_plan(runs, regime, method, rates, CHOOSING_SEEDS):
                yield Job(regime, method, rate, seed)


def tuned_jobs(regimes: Sequence[str], methods: Sequence[str], records: Iterable[Record]) -> Iterator[Job]:
    """The judging seeds at each method's own best learning rate."""
    best = choose([*map(Run, records)], [])
    for seed in JUDGING_SEEDS:
        for (regime, method), rate in best.items():
            if regime in regimes and method in methods:
                yield Job(regime, method, rate, seed)


def key(record: Record) -> Job:
    return Job(record["regime"], record["method"], record["learning_rate"], record["seed"])


def load() -> dict[Job, Record]:
    """Every run there is, but those with settings or of methods that there are no more."""
    records = [json.loads(path.read_text()) for path in sorted(RUNS.glob("*/record.json"))]
    known = [each for each in records if each["regime"] in ALL_REGIMES and each["method"] in METHODS]
    return {key(record): record for record in known if record["settings"] == settings_of(key(record))}


def of_stability() -> list[Record]:
    """Those of the regimes of this report."""
    return [record for job, record in load().items() if job.regime in REGIMES]


def work(step: Callable[..., Any], *arguments: Any) -> None:
    """In a worker, whose output nobody reads."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        step(*arguments)
    except Exception:  # what a worker raises must be readable in the parent, whatever class it is of
        raise RuntimeError(f"{step.__name__} failed:\n{traceback.format_exc()}") from None


def in_parallel(step: Callable[..., Any], calls: Sequence[tuple[Any, ...]], workers: int, title: str) -> None:
    """`step` of each of the calls' arguments, in processes of one thread."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(work, step, *arguments) for arguments in calls]
        try:
            for future in tqdm(as_completed(futures), total=len(futures), unit="run", desc=title):
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def run_all(jobs: Iterable[Job], workers: int, title: str) -> None:
    """Every run that is not there yet."""
    done = load()
    todo = [job for job in dict.fromkeys(jobs) if job not in done]
    worlds = {(ALL_REGIMES[job.regime].world, job.seed): None for job in todo}
    RUNS.mkdir(parents=True, exist_ok=True)
    in_parallel(prepare, [(world, seed, RUNS) for world, seed in worlds], workers, "Worlds and policies")
    in_parallel(run, [(job, RUNS) for job in todo], workers, title)


def parse_arguments(words: Sequence[str]) -> Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--workers", type=at_least(1), default=os.cpu_count() or 1, help="runs at a time")
    arguments: Namespace = parser.parse_args(words)
    return arguments


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    regimes, methods = arguments.regimes, arguments.methods
    if not arguments.report:
        run_all(judging_jobs(regimes, methods), arguments.workers, "At the common learning rate")
        for _ in CHOOSING_SEEDS:  # what the first seed shows says what the next ones are asked
            run_all(choosing_jobs(regimes, methods, of_stability()), arguments.workers, "Choosing learning rates")
        run_all(tuned_jobs(regimes, methods, of_stability()), arguments.workers, "At each method's own")
    write_report(of_stability(), read_rows(RESULTS / "stability.json"), RESULTS)
    print(f"The report is in {RESULTS / 'stability.md'}.")


if __name__ == "__main__":
    sys.exit(run_command(main))
