"""Does turn-level training hold where token-level training collapses?

    python -m benchmarks.stability            # everything: hours, and it goes on where it was interrupted
    python -m benchmarks.stability --quick    # one regime, four methods, two seeds: minutes
    python -m benchmarks.stability --report   # only writes the report again

Runs every method of `stability_methods.py` in every regime of `stability_grid.py` through the real trainers, in
processes of one thread. The runs are kept, in short, in `benchmarks/results/stability_runs.jsonl.xz`; those that are
there, or in `runs/stability/`, are not repeated. `runs/stability/` also has each run's metrics of every update
(`log.jsonl`).

Order: the judging seeds at the common learning rate, the choosing seeds on the grid of learning rates, then the
judging seeds at each method's own best. Writes `benchmarks/results/stability.md`, `.json` and pictures.
"""

from __future__ import annotations

import json
import lzma
import multiprocessing
import os
import sys
import traceback
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
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

from benchmarks.stability_grid import CHOOSING_SEEDS, JUDGING_SEEDS, REGIMES
from benchmarks.stability_methods import METHODS
from benchmarks.stability_report import write_report
from benchmarks.stability_run import REGIMES as PLANNED_REGIMES
from benchmarks.stability_run import Job, prepare, run, settings_of
from benchmarks.stability_statistics import choose_learning_rates, choosing_plan, published_grid, read_runs
from sorl_trl.command_line import Parser, at_least, run_command

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs/stability"
RESULTS = Path(__file__).parent / "results"
ARCHIVE = RESULTS / "stability_runs.jsonl.xz"
READING = Path(__file__).parent / "stability_reading.md"
"""What the tables mean, written by hand."""
QUICK = (("reuse",), ("grpo", "so_grpo", "ppo", "so_ppo"), JUDGING_SEEDS[:2])


def choosing_jobs(regimes: Sequence[str], methods: Sequence[str], records: list[dict[str, Any]]) -> Iterator[Job]:
    """The choosing runs that are needed, as far as `records` tell."""
    grid = published_grid()
    runs = read_runs(records, grid)
    for regime in regimes:
        for method in methods:
            for rate, seed in choosing_plan(runs, grid, regime, method):
                yield Job(regime, method, rate, seed)


def judging_jobs(regimes: Sequence[str], methods: Sequence[str], seeds: Sequence[int]) -> Iterator[Job]:
    """The runs at the common learning rate, of the methods that a regime has."""
    grid = published_grid()
    for seed in seeds:
        for regime in regimes:
            for method in filter(grid.methods_in(regime).__contains__, methods):
                yield Job(regime, method, REGIMES[regime].learning_rate, seed)


def tuned_jobs(regimes: Sequence[str], methods: Sequence[str], records: list[dict[str, Any]]) -> Iterator[Job]:
    """The judging seeds at each method's own best learning rate."""
    best = choose_learning_rates(records)
    for seed in JUDGING_SEEDS:
        for regime in regimes:
            for method in methods:
                if (regime, method) in best:
                    yield Job(regime, method, best[regime, method], seed)


def key(record: dict[str, Any]) -> Job:
    return Job(record["regime"], record["method"], record["learning_rate"], record["seed"])


def load(archived: bool = True) -> list[dict[str, Any]]:
    """Every run there is: of `runs/stability/`, and unless `archived` is false, of the archive.

    Those of methods, with settings or at learning rates that are not in the grid any more are left out.
    """
    records = {key(record): record for record in read_all(ARCHIVE if archived else None) if is_current(record)}
    return [records[job] for job in sorted(records, key=str)]


def read_all(archive: Path | None) -> list[dict[str, Any]]:
    """The runs in an archive, if it is there, and then those in `runs/stability/`."""
    found = [json.loads(path.read_text()) for path in sorted(RUNS.glob("*/record.json"))]
    return [*read_archive(archive), *found] if archive else found


def read_archive(archive: Path) -> list[dict[str, Any]]:
    """Its runs; none where it is not there."""
    if not archive.is_file():
        return []
    with lzma.open(archive, "rt") as lines:
        return [*map(json.loads, lines)]


def is_made_as(record: Mapping[str, Any], job: Job) -> bool:
    """Whether a run was made with today's settings, and says by which version of the benchmark."""
    return "harness" in record and record["settings"] == settings_of(job)


def is_current(record: dict[str, Any]) -> bool:
    job = key(record)
    if job.regime not in REGIMES or job.method not in published_grid().methods_in(job.regime):
        return False
    if not is_made_as(record, job):
        return False
    regime = REGIMES[job.regime]
    judges = (regime.learning_rate,) if job.seed in JUDGING_SEEDS else ()
    return job.learning_rate in (*judges, *regime.learning_rates)


def save(records: Iterable[dict[str, Any]], archive: Path | None = None) -> None:
    archive = archive or ARCHIVE
    partial = archive.with_suffix(".part")
    with lzma.open(partial, "wt") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)
    partial.replace(archive)


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


def run_all(jobs: Iterable[Job], workers: int, title: str, archived: bool = True) -> None:
    """Every run that is not there yet."""
    run_missing(jobs, set(map(key, load(archived))), workers, title)


def run_missing(jobs: Iterable[Job], done: Container[Job], workers: int, title: str) -> None:
    """Every run but those that are done."""
    todo = [job for job in dict.fromkeys(jobs) if job not in done]
    worlds = {(PLANNED_REGIMES[job.regime].world, job.seed): None for job in todo}
    RUNS.mkdir(parents=True, exist_ok=True)
    in_parallel(prepare, [(world, seed, RUNS) for world, seed in worlds], workers, "Worlds and policies")
    in_parallel(run, [(job, RUNS) for job in todo], workers, title)


def quick(workers: int) -> None:
    """A small part of the judging runs, run here whatever the archive has, reported in `runs/stability/quick`."""
    regimes, methods, seeds = QUICK
    jobs = list(judging_jobs(regimes, methods, seeds))
    run_all(jobs, workers, "Runs", archived=False)
    grid = replace(
        published_grid(),
        regimes={name: REGIMES[name] for name in regimes},
        methods={name: METHODS[name] for name in methods},
        choosing_seeds=(),
        judging_seeds=seeds,
    )
    folder = RUNS / "quick"
    write_report([record for record in load(archived=False) if key(record) in jobs], folder, grid)
    print(f"The report is in {folder / 'stability.md'}.")


def parse_arguments(words: Sequence[str]) -> Namespace:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small part, with a report of its own in runs/")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--workers", type=at_least(1), default=os.cpu_count() or 1, help="runs at a time")
    arguments: Namespace = parser.parse_args(words)
    return arguments


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    if arguments.quick:
        quick(arguments.workers)
        return
    if not arguments.report:
        regimes, methods = arguments.regimes, arguments.methods
        judging = judging_jobs(regimes, methods, JUDGING_SEEDS)
        run_all(judging, arguments.workers, "At the common learning rate")
        for _ in CHOOSING_SEEDS:  # what the first seed shows says what the next ones are asked
            run_all(choosing_jobs(regimes, methods, load()), arguments.workers, "Choosing learning rates")
        run_all(tuned_jobs(regimes, methods, load()), arguments.workers, "At each method's own")
    records = load()
    save(records)
    write_report(records, RESULTS, reading=READING.read_text() if READING.is_file() else "")
    print(f"The report is in {RESULTS / 'stability.md'}.")


if __name__ == "__main__":
    sys.exit(run_command(main))
