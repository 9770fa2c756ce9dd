"""Does turn-level training hold where token-level training collapses?

    python -m benchmarks.stability                                             # everything: hours
    python -m benchmarks.stability --regimes reuse --methods grpo so_grpo      # some of it
    python -m benchmarks.stability --report   # only writes the report again

Runs every method of `stability_plan.py` in every regime through the real trainers, in processes of one thread. Runs
are kept in `runs/stability/`, each with its metrics of every update (`log.jsonl`), and those that are there are not
repeated.

All methods of a regime have its learning rate; `benchmarks.equal_rates` searches for others, and makes them equal.
Writes `benchmarks/results/stability.json` and `.md`, in which the rows of new runs replace those of earlier ones.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("PYTHONWARNINGS", "ignore")
# Keep freed memory: asking for it anew takes a tenth of a run's time.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**33))

from tqdm.auto import tqdm

from benchmarks.common import RESULTS, locked, read_rows
from benchmarks.stability_plan import JUDGING_SEEDS, METHODS, REGIMES
from benchmarks.stability_report import Record, write_report
from benchmarks.stability_run import Job, followed_by, prepare, run, settings_of
from benchmarks.trust_plan import EVERY_METHOD, EVERY_REGIME
from sorl_trl.command_line import Parser, at_least, run_command

RUNS = Path(__file__).parents[1] / "runs/stability"


def judging_jobs(regimes: Sequence[str], methods: Sequence[str]) -> Iterator[Job]:
    """The methods that a regime has, at its learning rate."""
    for seed in JUDGING_SEEDS:
        for regime in regimes:
            for method in filter(REGIMES[regime].methods.__contains__, methods):
                yield Job(regime, method, REGIMES[regime].learning_rate, seed)


def key(record: Record) -> Job:
    return Job(record["regime"], record["method"], record["learning_rate"], record["seed"])


def load() -> dict[Job, Record]:
    """Every run there is, but those with settings or of methods that there are no more.

    Nor does one count that followed the learning rates of a run which has been made again, with others.
    """
    records = [json.loads(path.read_text()) for path in sorted(RUNS.glob("*/record.json"))]
    known = [each for each in records if each["regime"] in EVERY_REGIME and each["method"] in EVERY_METHOD]
    found = {key(record): record for record in known if record["settings"] == settings_of(key(record))}
    followed = {job: found.get(followed_by(job)) for job in found}
    return {job: each for job, each in found.items() if (of := followed[job]) and of["rates"] == each["rates"]}


def of_stability() -> list[Record]:
    """Those of the regimes of this report."""
    return [record for job, record in load().items() if job.regime in REGIMES and job.method in METHODS]


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


def run_all(jobs: Iterable[Job], workers: int, title: str) -> None:
    """Every run that is not there yet, but those that would follow one that died. Other commands wait meanwhile."""
    RUNS.mkdir(parents=True, exist_ok=True)
    with locked(RUNS / "lock"):
        done = load()
        todo = [job for job in dict.fromkeys(jobs) if job not in done]
        todo = [job for job in todo if not done.get(followed_by(job), {}).get("error")]
        worlds = {(EVERY_REGIME[job.regime].world.name, job.seed): EVERY_REGIME[job.regime].world for job in todo}
        calls = [(world, seed, RUNS) for (_, seed), world in worlds.items()]
        in_parallel(prepare, calls, workers, "Worlds and policies")
        in_parallel(run, [(job, RUNS) for job in todo], workers, title)


def main(words: Sequence[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--workers", type=at_least(1), default=os.cpu_count() or 1, help="runs at a time")
    arguments = parser.parse_args(words)
    regimes, methods = arguments.regimes, arguments.methods
    if not arguments.report:
        run_all(judging_jobs(regimes, methods), arguments.workers, "Methods")
    write_report(of_stability(), read_rows(RESULTS / "stability.json"))
    print(f"The report is in {RESULTS / 'stability.md'}.")


if __name__ == "__main__":
    sys.exit(run_command(main))
