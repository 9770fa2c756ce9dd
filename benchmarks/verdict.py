"""What does the method change when a pretrained language model learns to search a second time?

    python -m examples.quickstart.model smollm2-135m models/smollm2-135m
    python -m benchmarks.verdict             # every run of the plan that has no row yet: days on one core
    python -m benchmarks.verdict --most 4    # so many of them
    python -m benchmarks.verdict --report    # only writes the tables again

Each run adds a line to `benchmarks/results/verdict.jsonl`, where the next start goes on, on any machine; several
starts may work side by side. World, warm start and questions are made first, and stay in `runs/verdict/`, as does what
a run logs of every update.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import product, zip_longest
from pathlib import Path
from statistics import fmean

os.environ.setdefault("PYTHONWARNINGS", "ignore")

from examples.quickstart import LANGUAGE_MODEL
from examples.quickstart.expert import PLAIN_LIMITS

from benchmarks.common import ALLOCATION, RESULTS, Row, alone, claim, locked, read_lines, table
from benchmarks.stability_plan import ARMS as STABILITY
from benchmarks.stability_plan import BenchmarkMethod
from benchmarks.stability_report import error_of
from benchmarks.stability_run import Job
from benchmarks.verdict_run import ROLLOUTS, TRIES, WARM_START, Column, prepare, run
from benchmarks.worlds.atlas import Ponderer
from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.files import write_whole
from sorl_trl.methods import METHODS

RUNS = Path("runs/verdict")
ROWS, PREPARED = RESULTS / "verdict.jsonl", RESULTS / "verdict_prepared.json"
ALONE = {**ALLOCATION, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

_LIMITS = replace(PLAIN_LIMITS, max_turn_tokens=128, max_trajectory_tokens=512)
# Eight examples in a batch would take more memory than a run.
_THOUGHTS = replace(LANGUAGE_MODEL, expert=Ponderer, limits=_LIMITS, batch_size=3, steps=40)
TURNS = {
    "short": Column("Turns of 10", "short", LANGUAGE_MODEL, trajectories=64, candidates=200, sampled=300),
    "long": Column("Turns of 80", "long", _THOUGHTS, trajectories=32, candidates=80, sampled=150),
}
HARD = {f"{name}-hard": replace(of, title=f"{of.title}, hard", updates=32, times=3) for name, of in TURNS.items()}
COLUMNS = TURNS | HARD
RATE = 5e-6
"""That of `recipes/smollm2_search.yaml`."""
GRID = (1.5e-6, 5e-6, 1.5e-5, 5e-5)
"""Rates that are searched, in the setting of the recipe."""
DEFAULT, YOKED, CONTROLLED = "so_grpo", "yoked_grpo", "grpo_target"
_DEFAULT, _GRPO, _SO_PPO = (METHODS[name] for name in ("so_grpo", "grpo", "so_ppo"))
ARMS = {
    DEFAULT: BenchmarkMethod("**SO-GRPO**", _DEFAULT),
    YOKED: BenchmarkMethod("GRPO, yoked", _GRPO, follows=DEFAULT),
    CONTROLLED: BenchmarkMethod("GRPO + our target KL", replace(_GRPO, target_kl=_DEFAULT.target_kl)),
    "grpo": BenchmarkMethod("GRPO", _GRPO, is_searched=True),
    "gspo": STABILITY["gspo"],  # with TRL's range: that of its authors is for long texts
    "sequence": BenchmarkMethod("`sequence`", replace(STABILITY["sequence"].method, target_kl=0.0), is_searched=True),
    "so_grpo_constant": BenchmarkMethod("SO-GRPO, `target_kl=0`", replace(_DEFAULT, target_kl=0.0), is_searched=True),
    "so_ppo": BenchmarkMethod("SO-PPO", _SO_PPO),
    "so_ppo_slow": BenchmarkMethod("SO-PPO, head at .02", _SO_PPO),
    "so_ppo_fast": BenchmarkMethod("SO-PPO, head at .3", _SO_PPO),
    "so_ppo_model": BenchmarkMethod("SO-PPO, a model as critic", _SO_PPO),
}
SEARCHED = tuple(name for name, arm in ARMS.items() if arm.is_searched)
CHOOSING, JUDGING = (101, 102), tuple(range(501, 513))
"""Seeds of the order of questions and of sampling; all arms but the pair are judged by the first six."""


def job_of(row: Row) -> Job:
    return Job(row["column"], row["arm"], row["rate"], row["seed"])


def job(column: str, arm: str, seed: int, rate: float = RATE) -> Job:
    return Job(column, arm, float(f"{COLUMNS[column].times * rate:.3g}"), seed)


def searched(rows: Sequence[Row], turns: str, arm: str) -> dict[float, float]:
    """Learning rate to the mean score of the choosing seeds, of the rates with which all of them have run."""
    made = {job_of(row): row["sampled"] for row in rows}
    tried = {rate: [made.get(job(turns, arm, seed, rate)) for seed in CHOOSING] for rate in GRID}
    return {rate: fmean(scores) for rate, scores in tried.items() if None not in scores}


def judged(rows: Sequence[Row], column: str, arm: str) -> list[Job]:
    """The runs that judge an arm: none until its rate is known, which is the best, and of equals the lowest."""
    scores = searched(rows, COLUMNS[column].turns, arm) if ARMS[arm].is_searched else dict.fromkeys(GRID, 0.0)
    if len(scores) < len(GRID):
        return []
    rate = max(scores, key=lambda rate: (scores[rate], -rate)) if ARMS[arm].is_searched else RATE
    return [job(column, arm, seed, rate) for seed in (JUDGING if arm in (DEFAULT, YOKED) else JUDGING[:6])]


def plan(rows: Sequence[Row]) -> Iterator[tuple[str, Job]]:
    """Every run with its stage, what matters most first."""
    first, more = JUDGING[:6], JUDGING[6:]
    both = {turns: [name for name, column in COLUMNS.items() if column.turns == turns] for turns in TURNS}
    for columns in both.values():
        pairs = product(first, columns, (DEFAULT, YOKED))
        yield from (("the pair", job(column, arm, seed)) for seed, column, arm in pairs)
        controlled = product(first, columns)
        yield from ((ARMS[CONTROLLED].title, job(column, CONTROLLED, seed)) for seed, column in controlled)
    for turns, columns in both.items():
        for arm in SEARCHED:
            tried = (job(turns, arm, seed, rate) for rate, seed in product(GRID, CHOOSING))
            yield from (("search of rates", each) for each in tried)
            for column in columns:
                yield from (("at searched rates", each) for each in judged(rows, column, arm))
        if turns == "short":
            critics = product(first, (arm for arm in ARMS if ARMS[arm].method.needs_critic))
            yield from (("with a critic", job(turns, arm, seed)) for seed, arm in critics)
        pairs = product(more, columns, (DEFAULT, YOKED))
        yield from (("the pair", job(column, arm, seed)) for seed, column, arm in pairs)


def load() -> list[Row]:
    """Each run once, in the order in which they were made."""
    return [*{job_of(row): row for row in read_lines(ROWS)}.values()]


def prepared_for(turns: str, model: str) -> Row:
    """What runs with such turns share, made here unless this machine has it."""
    with locked(RUNS / "prepare.lock"):
        found = dict(json.loads(PREPARED.read_text())) if PREPARED.is_file() else {}
        if turns not in found or not (RUNS / turns / WARM_START).is_dir():
            found[turns] = alone(ALONE, prepare, TURNS[turns], model, RUNS, found.get(turns, {}))
            write_whole(PREPARED, f"{json.dumps(found)}\n".encode())
    return dict(found[turns])


def followed(job: Job) -> Job:
    """The run whose learning rates it takes: its own, if the arm follows none."""
    return replace(job, arm=ARMS[job.arm].follows or job.arm)


def next_job(rows: Sequence[Row]) -> Job | None:
    """What nobody has made or makes, and follows nothing that is still to be made."""
    done = {*map(job_of, rows)}
    todo = (job for _, job in plan(rows) if job not in done and followed(job) in {*done, job})
    return next((job for job in todo if claim(RUNS / f"{job.name}.claim", RUNS / "lock")), None)


def make(job: Job, rows: Sequence[Row], model: str) -> None:
    """Run, and add the row."""
    rates = next((row["rates"] for row in rows if job_of(row) == followed(job)), [])
    column, arm = COLUMNS[job.column], ARMS[job.arm]
    row = alone(ALONE, run, job, column, arm, RUNS, prepared_for(column.turns, model), rates)
    row["rates"] = row["rates"] if job.arm == DEFAULT else [fmean(row["rates"])]
    with locked(RUNS / "lock"), ROWS.open("a") as file:
        file.write(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n")
    print(f"{datetime.now():%H:%M} {job.name}: {row['sampled']:.3f}, CPU-seconds {row['seconds']}", flush=True)


HEADER = f"""# The verdict on a language model

Written by `python -m benchmarks.verdict` from its runs (`verdict.jsonl`): SmolLM2-135M-Instruct in mixed precision
(bfloat16), in a world of real facts. Its warm start has learnt the protocol, and mostly searches once; half of the
questions need two searches. A run has {ROLLOUTS} rollouts of questions that the warm start answers in 1 to {TRIES - 1}
of {TRIES} tries. A score is the exact match of sampled answers to other questions, the same for all runs. ± is the
standard error over seeds, and brackets hold 95 % intervals of Student's t. [Predictions](verdict_predictions.md) were
committed before the first run.

In the setting of the recipe, a rollout has 16 updates, and the learning rate is {RATE:g}. In the hard one, it has 32,
and every arm three times its rate. Yoked GRPO has, update for update, the rates of SO-GRPO with the same seed. A
constant rate is the best of {len(GRID)}, searched in the setting of the recipe for each length of turns. The runs that
judge it, {len(COLUMNS) * len(SEARCHED) * 6}, are planned once it is known.

The second table of a column has the mean of each rollout, as others plot it: reward, share of tokens that are clipped,
KL per token to the policy of the rollout, entropy per token, and what the critic explains of the returns. Nothing is
claimed of models that were not trained."""
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 11: 2.23, 12: 2.20}
"""Number of seeds -> how many standard errors a 95 % interval reaches to either side."""
NAMES = (
    *("", "seeds", "rate", "mean rate", "exact match", "SO-GRPO less it", "below start", "two hops", "greedy"),
    *("largest KL", "score of each seed"),
)
SHAPES = {"reward": ".2f", "clipped": ".3f", "kl": ".0e", "entropy": ".3f", "explained": ".2f"}
Cells = Mapping[str, Mapping[int, Row]]
"""Arm -> seed -> row."""


def report(rows: Sequence[Row]) -> str:
    """`verdict.md`."""
    by_job, blocks = {job_of(row): row for row in rows}, [HEADER, _stages(rows)]
    for column, about in COLUMNS.items():
        jobs = {arm: [job for job in judged(rows, column, arm) if job in by_job] for arm in ARMS}
        cells = {arm: {job.seed: by_job[job] for job in of} for arm, of in jobs.items() if of}
        if made := [job for of in jobs.values() for job in of]:
            start = by_job[made[0]]["start"]
            said = f"The warm start scores {start['sampled']:.3f}, {start['by_hops'][1]:.3f} where there are two hops."
            lines = [[ARMS[arm].title, *(_curve(of, *shape) for shape in SHAPES.items())] for arm, of in cells.items()]
            blocks += [f"## {about.title}", said, table(NAMES, [_line(arm, cells) for arm in cells], 1)]
            blocks += [table(["", *SHAPES], lines, 1)]
    return "\n\n".join(block.strip() for block in [*blocks, *_search(rows)]) + "\n"


def _stages(rows: Sequence[Row]) -> str:
    """How many runs of the plan were made."""
    hours = {job_of(row): sum(row["seconds"]) / 3600 for row in rows}
    stages: dict[str, list[float]] = {}
    for stage, job in dict.fromkeys(plan(rows)):
        stages.setdefault(stage, []).append(hours.get(job, 0.0))
    lines = [[stage, str(len(of)), str(sum(map(bool, of))), f"{sum(of):.1f}"] for stage, of in stages.items()]
    return table(["", "runs planned", "made", "CPU-hours"], lines, 1)


def _line(arm: str, cells: Cells) -> list[str]:
    rows, own = [*cells[arm].values()], cells.get(DEFAULT, {})
    less = [own[seed]["sampled"] - row["sampled"] for seed, row in cells[arm].items() if seed in own]
    return [
        *(
            ARMS[arm].title,
            str(len(rows)),
            f"{rows[0]['rate']:g}",
            f"{fmean(fmean(row['rates']) for row in rows):.1e}",
        ),
        *(_with_error([row["sampled"] for row in rows]), "" if arm == DEFAULT else _with_error(less, "+")),
        str(sum(row["sampled"] < row["start"]["sampled"] for row in rows)),
        *(f"{fmean(row['by_hops'][1] for row in rows):.3f}", f"{fmean(row['greedy'] for row in rows):.3f}"),
        f"{max(kl or 0 for row in rows for kl in row['kl_max']):.1e}",
        " ".join(f"{row['sampled']:.3f}" for row in rows),
    ]


def _with_error(values: Sequence[float], sign: str = "") -> str:
    """Mean and standard error; of a difference, with its sign, also the interval."""
    if len(values) < 2:
        return " ".join(f"{value:{sign}.3f}" for value in values)
    mean, error = fmean(values), error_of(values)
    reach = STUDENT[len(values)] * error
    return f"{mean:{sign}.3f} ± {error:.3f}" + (f" [{mean - reach:+.3f}, {mean + reach:+.3f}]" if sign else "")


def _curve(cells: Mapping[int, Row], name: str, how: str) -> str:
    """The mean of each rollout over seeds."""
    rollouts = zip_longest(*(row[name] for row in cells.values()))  # a run that died has fewer
    values = [[each for each in of if each is not None] for of in rollouts]
    return " ".join(format(fmean(of), how) for of in values if of)


def _search(rows: Sequence[Row]) -> Iterator[str]:
    scores = {(turns, arm): searched(rows, turns, arm) for turns in TURNS for arm in SEARCHED}
    lines = [
        [TURNS[turns].title, ARMS[arm].title, *(f"{of[rate]:.3f}" if rate in of else "–" for rate in GRID)]
        for (turns, arm), of in scores.items()
        if of
    ]
    if not lines:
        return
    yield f"## Searched learning rates\n\nMean score of seeds {CHOOSING[0]} and {CHOOSING[1]}; the best rate judges."
    yield table(["turns", "arm", *(f"{rate:g}" for rate in GRID)], lines, 2)


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="models/smollm2-135m", help="folder that `make model` wrote")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--most", type=at_least(1), default=10**6, help="stop after so many runs")
    arguments = parser.parse_args(words)
    RUNS.mkdir(parents=True, exist_ok=True)
    left = 0 if arguments.report else arguments.most
    while left and (job := next_job(rows := load())):
        make(job, rows, arguments.model)
        left -= 1
    write_whole(RESULTS / "verdict.md", report(load()).encode())
    print(f"The report is in {RESULTS / 'verdict.md'}.")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(run_command(main))
