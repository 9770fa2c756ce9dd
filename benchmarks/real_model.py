"""Do turn ratios help a pretrained language model, where learning rates are equal?

SmolLM2-135M-Instruct learns to search a second time (`recipes/smollm2_search.yaml`), with many updates of each rollout
and five arms, which share warm start, questions and, seed by seed, the first rollout. One of them is *yoked*: GRPO at
the learning rates that the target KL gave to SO-GRPO with the same seed, update for update.

    python -m examples.quickstart.model smollm2-135m models/smollm2-135m
    python -m benchmarks.real_model --prepare  # world, warm start and questions, which other machines can take over
    python -m benchmarks.real_model            # every run that is not there yet
    python -m benchmarks.real_model --report   # only writes the report again

Each run adds a row to `results/real_model.json`. A run that is there is not made again, and one that was interrupted
starts anew. Several of these commands may work side by side: each takes runs that nobody works on. Where there is a
GPU, it does the work, in float32 as on a CPU, and rows record it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

import torch
import yaml
from examples.quickstart.demo import PRETRAINED, prepare
from examples.quickstart.world import TRAIN_FILE
from safetensors.torch import load_file, save_file
from transformers.utils import SAFE_WEIGHTS_NAME

from benchmarks.common import ALLOCATION, RESULTS, Row, alone, claim, locked, read_rows, sorl, table, write_rows
from benchmarks.stability_run import Rates
from sorl_trl.cli.arguments import parse_arguments
from sorl_trl.cli.build import build_trainer
from sorl_trl.command_line import RECIPES, Parser, UserMistake, run_command
from sorl_trl.records import RECIPE_FILE
from sorl_trl.records.evaluated import read_evaluated

ROWS = RESULTS / "real_model.json"
RUNS = Path("runs/real_model")
UPDATES, ROLLOUTS = 16, 5
SETTINGS: dict[str, Any] = {
    **{"num_generations": 8, "per_device_train_batch_size": 8, "steps_per_generation": 8, "num_iterations": 2},
    **{"max_steps": ROLLOUTS * UPDATES, "train_questions": str(RUNS / TRAIN_FILE), "dtype": "float32"},
    **{"log_turn_details": True, "disable_tqdm": True, "collapse_guard": "off", "save_strategy": "no"},
    **{"kv_cache_gib": 1},
}
"""Beside the recipe: 64 trajectories a rollout, with 16 updates of eight each, in two passes."""
YOKE, YOKED = "so_grpo", "yoked_grpo"
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    YOKE: ("SO-GRPO", {}),
    "grpo": ("GRPO", {"method": "grpo"}),
    "gspo": ("GSPO", {"method": "gspo"}),
    "so_grpo_constant": ("SO-GRPO, `target_kl=0`", {"target_kl": 0}),
    YOKED: ("GRPO, yoked", {"method": "grpo"}),
}
SEARCHED = tuple(arm for arm in ARMS if arm != YOKED)
UNCHOSEN = "so_grpo_all_questions"
"""SO-GRPO where nobody has chosen the questions."""
CHOOSING, JUDGING = (101, 102, 103), tuple(range(301, 313))
"""Seeds of training: of the order of questions and of sampling. World and warm start are the same in all runs."""
FEWEST = 6
"""Pairs of judging seeds that run before anything else."""
GRID, FIRST_RATES = (5e-8, 1.5e-7, 5e-7, 1.5e-6, 5e-6, 1.5e-5, 5e-5, 1.5e-4, 5e-4), (5e-6, 1.5e-5, 1.5e-6)
"""The first is the recipe's. Where an end of what has run is best, the next rate of the grid follows, up or down."""
CANDIDATES, TRIES, QUESTIONS = 400, 8, 1000
DEVICE = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Job:
    """One run."""

    arm: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.learning_rate:g}-{self.seed}"


CURVES = tuple(Job(arm, FIRST_RATES[0], CHOOSING[0]) for arm in (YOKE, UNCHOSEN))
"""What choosing the questions changes, shown by one run each."""


def by_job(rows: Sequence[Row]) -> dict[Job, Row]:
    return {Job(row["arm"], row["learning_rate"], row["seed"]): row for row in rows}


def means(rows: Sequence[Row], arm: str) -> dict[float, float]:
    """Learning rate to the mean final exact match, of the rates with which all choosing seeds have run."""
    ends = {rate: [by_job(rows).get(Job(arm, rate, seed)) for seed in CHOOSING] for rate in GRID}
    return {rate: fmean(row["final_em"] for row in of if row) for rate, of in ends.items() if all(of)}


def best_rate(rows: Sequence[Row], arm: str) -> float:
    """Of equals the lowest. At least one rate must have run with all choosing seeds."""
    found = means(rows, arm)
    return max(found, key=lambda rate: found[rate])


def left(rows: Sequence[Row]) -> list[Job]:
    """What has not run, in the order in which it is to run: first the pairs, which need no search for a rate."""
    pairs = [Job(arm, FIRST_RATES[0], seed) for seed in JUDGING for arm in (YOKE, YOKED)]
    first = [Job(arm, rate, seed) for rate in FIRST_RATES for seed in CHOOSING for arm in SEARCHED]
    jobs = dict.fromkeys([*pairs[: 2 * FEWEST], *CURVES, *pairs, *first])
    done = by_job(rows)
    if jobs.keys() <= done.keys():
        near = {arm: GRID.index(best_rate(rows, arm)) for arm in SEARCHED}
        beside = [(arm, rate) for arm, at in near.items() for rate in GRID[max(at - 1, 0) : at + 2]]
        jobs |= dict.fromkeys(Job(arm, rate, seed) for arm, rate in beside for seed in CHOOSING)
    if jobs.keys() <= done.keys():
        jobs |= dict.fromkeys(Job(arm, best_rate(rows, arm), seed) for seed in JUDGING for arm in SEARCHED)
    return [job for job in jobs if job not in done]


def answers(policy: Path, output: Path, dataset: str = "eval", *words: Any) -> list[Row]:
    """What a policy answers when it is sampled."""
    asked = (RUNS, "--model_name_or_path", policy, "--temperature", 1, "--batch_size", 128, "--kv_cache_gib", 1.5)
    sorl(output.parent, "evaluate", *asked, "--output", output, *words)
    return list(read_evaluated(output, dataset))


def by_hops(rows: Sequence[Row], name: str) -> dict[str, float]:
    """The mean of a measure over all questions, and over those that need one search and two."""
    values = [(json.loads(row["metadata"])["hops"], row[name]) for row in rows]
    parts = {"all": (1, 2), "one hop": (1,), "two hops": (2,)}
    return {part: round(fmean(v for hops, v in values if hops in of), 4) for part, of in parts.items()}


def prepare_runs(model: str) -> Row:
    """Write world, warm start (in 16 bits, to be copied), recipe and training questions; what rows record of them."""
    if (RUNS / "prepared.json").is_file():
        return dict(json.loads((RUNS / "prepared.json").read_text()))
    alone({}, prepare, 0, replace(PRETRAINED, questions=QUESTIONS), RUNS, model)
    weights = RUNS / "warm-start" / SAFE_WEIGHTS_NAME
    save_file({name: each.half() for name, each in load_file(weights).items()}, weights, {"format": "pt"})
    recipe = RECIPES.find(PRETRAINED.recipe).read_text().replace(str(PRETRAINED.run), str(RUNS))
    (RUNS / RECIPE_FILE).write_text(yaml.safe_dump(yaml.safe_load(recipe) | SETTINGS))
    (RUNS / TRAIN_FILE).write_text("".join(f"{line}\n" for line in chosen_questions()))
    digests = {file.stem: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in (weights, RUNS / TRAIN_FILE)}
    prepared = {"digests": digests, "start_em": by_hops(answers(weights.parent, RUNS / "start"), "exact_match")}
    (RUNS / "prepared.json").write_text(json.dumps(prepared))
    return prepared


def chosen_questions() -> list[str]:
    """The lines of those candidates that the warm start answers now and then."""
    candidates = RUNS / "world" / TRAIN_FILE
    asked = ("--questions", candidates, "--limit", CANDIDATES, "--num_samples", TRIES)
    right: Counter[str] = Counter()
    for row in answers(RUNS / "warm-start", RUNS / "difficulty", candidates.stem, *asked):
        right[row["question_id"]] += int(row["exact_match"])
    lines = candidates.read_text().splitlines()[:CANDIDATES]
    return [line for line in lines if 0 < right[json.loads(line)["id"]] < TRIES]


def trained(words: Sequence[str], rates: Sequence[float], log: Path) -> Row:
    """Train as `sorl train` does, but with learning rates that are written down, and may be given."""
    with log.open("w") as file, redirect_stdout(file):
        arguments = parse_arguments(words)
        trainer = build_trainer(arguments)
        recorder = Rates(rates)
        trainer.add_callback(recorder)
        trainer.train()
        trainer.save_model(str(arguments.config.output_dir))
    return {"rates": recorder.taken, "log": trainer.state.log_history}


def run(job: Job, rates: Sequence[float], prepared: Row) -> Row:
    """Train, evaluate, and make the row."""
    folder = RUNS / job.name
    policy = folder / "policy"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
    folder.mkdir()
    settings = {"config": RUNS / RECIPE_FILE, "learning_rate": job.learning_rate, "seed": job.seed}
    settings |= {"output_dir": policy, "use_cpu": DEVICE == "cpu"}
    settings |= {"train_questions": RUNS / "world" / TRAIN_FILE} if job.arm == UNCHOSEN else ARMS[job.arm][1]
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    start = os.times()
    record = alone({}, trained, words, rates, folder / "train.txt")
    middle = os.times()
    found = answers(policy, folder / "sampled")
    seconds = {"train": _spent(start, middle), "evaluate": _spent(middle, os.times())}
    shutil.rmtree(policy)
    steps = [step for step in record["log"] if "kl_to_old" in step]
    rollouts = [step for step in steps if "reward" in step]
    final = by_hops(found, "exact_match")
    return {
        **{**vars(job), "device": DEVICE, "seconds": seconds, **prepared},
        "final_em": final["all"],
        "by_hops": {"exact_match": final, "searches": by_hops(found, "searches")},
        "below_start": final["all"] < prepared["start_em"]["all"],
        "rate_mean": fmean(record["rates"]),
        "rate_final": fmean(record["rates"][-UPDATES:]),
        "clip_fraction": fmean(step["clip_ratio/region_mean"] for step in steps),
        "kl_max": max(step["kl_to_old"] for step in steps),
        "grad_max": max(step["grad_norm"] for step in steps),
        "reward": [step["reward"] for step in rollouts],
        "differing": [1 - step["frac_reward_zero_std"] for step in rollouts],
        "searches": [step["rollout/searches_per_trajectory"] for step in rollouts],
        "rates": record["rates"],
    }


def _spent(start: Any, end: Any) -> dict[str, int]:
    """Seconds that have passed, and CPU-seconds of the processes that ran meanwhile."""
    cpu = sum(end[2:4]) - sum(start[2:4])
    return {"wall": round(end.elapsed - start.elapsed), "cpu": round(cpu)}


def write(rows: Sequence[Row]) -> None:
    """Rows and report."""
    write_rows(sorted(rows, key=lambda row: (row["seed"], row["learning_rate"], row["arm"])), ROWS)
    ROWS.with_suffix(".md").write_text(report(rows))


HEADER = f"""# A pretrained language model learns to search

`python -m benchmarks.real_model`: SmolLM2-135M-Instruct in float32, {ROLLOUTS} rollouts of 64 trajectories with
{UPDATES} updates each. It trains on questions that the warm start answers now and then in {TRIES} tries. Exact match
is that of sampled answers to {QUESTIONS:,} others, which nobody chose, and of which half need two searches. Yoked GRPO
has, update for update, the learning rates of SO-GRPO with the same seed. Effective rates are the optimizer's, over the
run and over its last rollout. Groups differ if their eight rewards are not all equal. ± is the standard error over
seeds; KL and gradient are the largest of any run.

**Predicted before the first run.** At the rates chosen for them, all arms end within .05 of SO-GRPO, and yoked GRPO
within .03: what SO-GRPO gains comes from its learning rate. At 1.5e-5, GRPO and SO-GRPO with `target_kl=0` end more
than .05 below SO-GRPO, and GSPO does not."""
COLUMNS = (
    *("", "seeds", "rate", "effective", "in the last rollout", "exact match", "minus SO-GRPO", "below the start"),
    *("groups that differ", "clipped", "KL", "gradient"),
)


def report(rows: Sequence[Row]) -> str:
    blocks = [HEADER]
    if rows:
        start = ", ".join(f"{name} {value:.3f}" for name, value in rows[0]["start_em"].items())
        blocks += [f"The warm start's exact match: {start}."]
    blocks += _judged(rows, "At equal learning rates", dict.fromkeys((YOKE, YOKED), FIRST_RATES[0]))
    if all(means(rows, arm) for arm in SEARCHED):
        blocks += _judged(rows, "At the rate that suits each arm", {arm: best_rate(rows, arm) for arm in SEARCHED})
    tried = {ARMS[arm][0]: means(rows, arm) for arm in SEARCHED}
    if rates := [rate for rate in GRID if any(rate in of for of in tried.values())]:
        lines = [[name, *(f"{of[rate]:.3f}" if rate in of else "–" for rate in rates)] for name, of in tried.items()]
        about = f"Mean final exact match on seeds {', '.join(map(str, CHOOSING))}; the best rate of an arm judges it."
        blocks += ["## Learning rates", about, table(["", *(f"{rate:g}" for rate in rates)], lines)]
    pair = [row for job, row in by_job(rows).items() if job in CURVES]
    blocks += ["## Questions that teach", _curves(pair)] if len(pair) == len(CURVES) else []
    return "\n\n".join(block.strip() for block in blocks if block) + "\n"


def _judged(rows: Sequence[Row], title: str, rates: Mapping[str, float]) -> list[str]:
    """A table of arms at these learning rates, of the seeds that judge, and what their number can show."""
    judged = {arm: {seed: by_job(rows).get(Job(arm, rate, seed)) for seed in JUDGING} for arm, rate in rates.items()}
    found = {arm: {seed: row for seed, row in of.items() if row} for arm, of in judged.items()}
    ends = {seed: row["final_em"] for seed, row in found[YOKE].items()}
    pairs = {arm: [of[seed]["final_em"] - ends[seed] for seed in ends if seed in of] for arm, of in found.items()}
    if not any(pairs[arm] for arm in pairs if arm != YOKE):
        return []
    lines = [_line(arm, [*of.values()], pairs[arm]) for arm, of in found.items() if of]
    every = [
        [str(seed), *(f"{of[seed]['final_em']:.3f}" if seed in of else "–" for of in found.values())] for seed in ends
    ]
    seeds = table(["seed", *(ARMS[arm][0] for arm in found)], every)
    return [f"## {title}", table(COLUMNS, lines), _shown(pairs), seeds]


def _curves(pair: Sequence[Row]) -> str:
    """Of the runs of `CURVES`, which are in this order."""
    lines = [
        [f"{title}, {which}", *(f"{value:.2f}" for value in (*row[name], fmean(row[name])))]
        for name, title in (("reward", "reward"), ("differing", "groups that differ"), ("searches", "searches"))
        for which, row in zip(("chosen questions", "all questions"), pair, strict=True)
    ]
    ends = " and ".join(f"{row['final_em']:.3f}" for row in pair)
    about = f"One run each of SO-GRPO at {pair[0]['learning_rate']:g} with seed {pair[0]['seed']}. They score {ends}."
    return f"{about}\n\n{table(['rollout', *map(str, range(1, ROLLOUTS + 1)), 'mean'], lines)}"


def _plus_minus(values: Sequence[float], sign: str = "") -> str:
    """Mean and standard error."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.3f}" if values[1:] else ""
    return f"{fmean(values):{sign}.3f}{error}" if values else "–"


def _line(arm: str, rows: Sequence[Row], differences: Sequence[float]) -> list[str]:
    return [
        *(ARMS[arm][0], str(len(rows)), f"{rows[0]['learning_rate']:g}"),
        *(f"{fmean(row[name] for row in rows):.2g}" for name in ("rate_mean", "rate_final")),
        _plus_minus([row["final_em"] for row in rows]),
        "" if arm == YOKE else _plus_minus(differences, "+"),
        str(sum(row["below_start"] for row in rows)),
        f"{fmean(share for row in rows for share in row['differing']):.2f}",
        f"{fmean(row['clip_fraction'] for row in rows):.1%}",
        *(f"{max(row[name] for row in rows):.2g}" for name in ("kl_max", "grad_max")),
    ]


def _shown(pairs: Mapping[str, Sequence[float]]) -> str:
    """What a number of seeds can show, by the differences of each arm to SO-GRPO."""
    if not (found := [each for arm, each in pairs.items() if arm != YOKE and each[1:]]):
        return ""
    deviation = fmean(map(variance, found)) ** 0.5
    seen = ", ".join(f"{2 * deviation / seeds**0.5:.3f} with {seeds}" for seeds in (3, 6, 12, 24))
    pair = f"The difference of one pair has a standard deviation of {deviation:.3f}"
    return f"{pair} ({sum(map(len, found))} pairs). What a number of seeds shows at two standard errors: {seen}."


def main(words: Sequence[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", default="models/smollm2-135m", help="folder that `make model` wrote")
    parser.add_argument("--prepare", action="store_true", help="make world, warm start and questions, and no run")
    parser.add_argument("--report", action="store_true", help="only write the report again")
    arguments = parser.parse_args(words)
    if arguments.report:
        write(read_rows(ROWS))
        return
    os.environ.update(ALLOCATION, OMP_NUM_THREADS="1")  # for what is started from here
    RUNS.mkdir(parents=True, exist_ok=True)
    with locked(RUNS / "start.lock"):  # the others wait for it
        prepared = prepare_runs(arguments.model)
    while not arguments.prepare and left(rows := read_rows(ROWS)):
        if strange := [row for row in rows if row["digests"] != prepared["digests"]]:
            raise UserMistake(
                f"{ROWS} has {len(strange)} rows of another warm start or other questions than {RUNS}: move it away, "
                "or bring the folder that made them."
            )
        made = by_job([row for row in rows if row["device"] == DEVICE])
        ready = [job for job in left(rows) if job.arm != YOKED or replace(job, arm=YOKE) in made]
        if (job := next((job for job in ready if claim(RUNS / f"{job.name}.claim", RUNS / "lock")), None)) is None:
            time.sleep(10)  # until others have made what must run first
            continue
        print(f"{datetime.now():%H:%M} {job.name}", flush=True)
        row = run(job, by_job(rows)[replace(job, arm=YOKE)]["rates"] if job.arm == YOKED else [], prepared)
        with locked(RUNS / "lock"):
            write([*by_job([*read_rows(ROWS), row]).values()])
        print(f"{datetime.now():%H:%M} {job.name}: {row['final_em']:.3f}, {row['seconds']}", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
