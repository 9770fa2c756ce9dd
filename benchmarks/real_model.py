"""Methods on a pretrained language model: which of them hold, and which collapse.

SmolLM2-135M-Instruct learns to search a second time (`recipes/smollm2_search.yaml`), with nine methods in three
regimes, and with two of them while rollouts are sampled ahead. The plan, written before the first judging seed ran, is
in docs/results.md.

    python -m examples.quickstart.model smollm2-135m models/smollm2-135m
    python -m benchmarks.real_model

Each run is `sorl train` and `sorl evaluate` in processes of their own, and adds a row to `results/real_model.json`. A
run that is there is not made again, and one that was interrupted goes on from its checkpoint. Several of these
commands may work side by side: each takes runs that nobody works on. Where there is a GPU, it does the work, in
float32 as on a CPU, and rows say so.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from examples.quickstart.demo import PRETRAINED, prepare
from transformers.utils import SAFE_WEIGHTS_NAME

from benchmarks.common import RESULTS, SORL, Row, alone, claim, locked, read_rows, table, write_rows
from sorl_trl.command_line import RECIPES, Parser, run_command
from sorl_trl.records.evaluated import read_evaluated

TITLES = {
    "gentle": "Gentle: 10 rollouts of 64, 8 updates each",
    "many_updates": "Many updates: 5 rollouts of 64, 24 updates each",
    "high_rate": "The same at three times the rate",
    "late": "Late: 10 rollouts of 64, 8 updates each, sampled up to four rollouts ahead",
    "ahead_0": "20 rollouts of 32, 4 updates each",
    "ahead_2": "The same, sampled up to two rollouts ahead",
    "ahead_8": "The same, sampled up to eight rollouts ahead",
}
HEADER = """# A pretrained language model learns to search

`python -m benchmarks.real_model`: SmolLM2-135M-Instruct, {parameters:,} parameters, and exact match on 200 questions
that nobody trained on: sampled before training, and sampled and greedy after it. Rows say by a digest from which warm
start they began, for where it is made anew it need not be the same. A cell of several seeds has their mean and each in
brackets. The columns of hops tell sampled answers apart by the searches that a question needs, with how many it got.
Runs on a GPU are in float32 too. Groups agree where all eight rewards are the same, so that nothing is learnt from
them. The learning rate is the mean factor by which the target KL multiplied it. A run has collapsed if it ends below
its start, or below half of its best three rollouts in a row. The clip fraction is its mean over updates, KL and
gradient are the largest of any run. The runs of `ppo` and `so_ppo` are older than the scaling of the critic's head and
than its own bound on the gradient."""
CHOOSING_HEADER = """## Learning rates

On seed 1 with many updates, the final sampled exact match of each rate; the best one is what judges a method."""
COLUMNS = (
    *("runs", "rate", "before", "sampled", "one hop", "searches", "two hops", "searches", "greedy"),
    *("collapsed", "groups that agree", "learning rate", "clipped", "KL", "gradient", "CPU-minutes a run"),
)


def report(rows: Sequence[Row]) -> str:
    blocks = [HEADER.format(parameters=rows[0]["policy_parameters"])]
    for regime, title in TITLES.items():
        methods = _by_method([row for row in rows if row["regime"] == regime and row["judging"]])
        if methods:
            blocks += [f"## {title}", table(["", *COLUMNS], [_cells(name, of) for name, of in methods.items()])]
    tried = _by_method([row for row in rows if not row["judging"]])
    if tried:
        rates = sorted({row["learning_rate"] for of in tried.values() for row in of})
        lines = []
        for name, of in tried.items():
            ends = {row["learning_rate"]: f"{row['final_em']:.3f}{_fallen([row])}" for row in of}
            lines.append([f"`{name}`", *(ends.get(rate, "–") for rate in rates)])
        blocks += [CHOOSING_HEADER, table(["", *(f"{rate:g}" for rate in rates)], lines)]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {name: [row for row in rows if row["method"] == name] for name in dict.fromkeys(r["method"] for r in rows)}


def _fallen(rows: Sequence[Row]) -> str:
    return ", collapsed" if any(row["collapsed"] for row in rows) else ""


def _several(each: Sequence[float]) -> str:
    """The mean, and each in brackets."""
    if not each:
        return "–"
    return f"{statistics.fmean(each):.3f}" + (f" ({', '.join(f'{one:.2f}' for one in each)})" if each[1:] else "")


def _cells(method: str, rows: Sequence[Row]) -> list[str]:
    def ends(name: str) -> str:
        return _several([row[name] for row in rows])

    def of_hops(hops: str, name: str) -> str:
        return _several([row["by_hops"][hops][name] for row in rows if "by_hops" in row])

    def largest(name: str) -> float:
        return max(row[name] for row in rows)

    # Of a run that was ended by hand it is not known.
    known = [row["cpu_seconds"] for row in rows if row["cpu_seconds"] and row["device"] == "cpu"]
    devices = Counter(row["device"] for row in rows)
    return [
        f"`{method}`",
        ", ".join(f"{number} on {'a CPU' if device == 'cpu' else device}" for device, number in devices.items()),
        f"{rows[0]['learning_rate']:g}",
        f"{statistics.fmean(row['start_em'] for row in rows):.3f}",
        ends("final_em"),
        *(of_hops(hops, name) for hops in ("1", "2") for name in ("exact_match", "searches")),
        ends("final_greedy_em"),
        f"{sum(row['collapsed'] for row in rows)} of {len(rows)}",
        *(_several([row[name] for row in rows if name in row]) for name in ("agreeing_groups", "lr_factor")),
        f"{statistics.fmean(row['clip_fraction'] for row in rows):.1%}",
        f"{largest('kl_max'):.2f}",
        f"{largest('grad_norm_max'):.0f}",
        f"{statistics.fmean(known) / 60:.0f}" if known else "–",
    ]


ROWS = RESULTS / "real_model.json"
RUNS = Path("runs/real_model")
CHOOSING, JUDGING = 1, (11, 12, 13)
"""Seeds of training: of the order of questions and of sampling. World and warm start are the same in all runs."""
RATES = (5e-6, 1.5e-5, 5e-5)
CHOOSING_REGIME = "many_updates"
REGIMES: dict[str, dict[str, Any]] = {
    "gentle": {"num_iterations": 1, "max_steps": 80},
    "many_updates": {"num_iterations": 3, "max_steps": 120},
    "late": {"num_iterations": 1, "async_staleness": 4, "max_steps": 80, "kv_cache_gib": 0.25},
}
"""Rollouts of 64 trajectories: 10 with 8 updates each, 5 with 24 each, and 10 with 8 each, sampled up to four rollouts
ahead."""
AHEAD: dict[str, dict[str, Any]] = {
    f"ahead_{ahead}": {
        **{"num_iterations": 1, "steps_per_generation": 4, "max_steps": 80},
        **{"async_staleness": ahead, "kv_cache_gib": 0.25},
    }
    for ahead in (0, 2, 8)
}
"""20 rollouts of 32 trajectories with 4 updates each. Up to nine are sampled at a time."""
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"method": "grpo"},
    "gspo": {"method": "gspo"},
    "grpo_target_kl": {"method": "grpo", "target_kl": 0.005},
    "so_grpo": {},
    "sequence": {"method": "sequence"},
    "so_grpo_note": {"method": "so_grpo_note"},
    "so_grpo_bias_norm": {"method": "st_grpo"},
    "ppo": {"trainer": "so_ppo", "method": "ppo"},
    "so_ppo": {"trainer": "so_ppo"},
}
TRIED: dict[str, dict[str, Any]] = {"so_grpo_kl_02": {"target_kl": 0.02}, "so_grpo_range_001": {"epsilon": 0.001}}
"""What the judged runs suggest in place of the defaults: on the choosing seed, at the two lower rates."""
THREE_SEEDS = ("grpo", "so_grpo", "gspo", "sequence")
"""In the regimes that are hard; the other methods, and all in the gentle one, are judged by one seed."""
TWO_AHEAD = THREE_SEEDS[:2]
HIGHER_RATE = 1.5e-5
"""Three times the recipe's, so that there is something to spoil."""
_OF_PPO = {"critic": "head", "num_generations": 1, "critic_warmup_steps": 8}
HIGH_RATE = {"high_rate": REGIMES["many_updates"]}
AT_A_HIGH_RATE = ("grpo", "grpo_target_kl", "so_grpo_note", "so_grpo", "ppo", "so_ppo")
"""At three times the rate that was chosen for them: does it take turn ratios, a target KL, or both? The choosing seed
asks it, so three others shall answer."""
DEVICE = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
ONE_GPU = {"distributed_type": "NO", "mixed_precision": "no", "num_processes": 1}
CPU = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33), "DS_ACCELERATOR": "cpu"}


@dataclass(frozen=True)
class Job:
    """One run."""

    method: str
    regime: str
    seed: int
    learning_rate: float

    @property
    def folder(self) -> Path:
        return RUNS / f"{self.regime}-{self.method}-{self.learning_rate:g}-{self.seed}"

    def is_of(self, row: dict[str, Any]) -> bool:
        return all(row[name] == value for name, value in vars(self).items())


def add_row(row: dict[str, Any]) -> None:
    """Also where several processes add theirs."""
    with locked(RUNS / "lock"):
        rows = [*read_rows(ROWS), row]
        rows.sort(key=lambda row: (row["regime"], row["method"], row["judging"], row["learning_rate"], row["seed"]))
        write_rows(rows, ROWS)
        ROWS.with_suffix(".md").write_text(report(rows))


def jobs() -> Iterator[Job]:
    """What is left: rollouts ahead, what is tried, the plan with GRPO and SO-GRPO first, the higher rate.

    What chooses a method's rate comes before what judges it.
    """
    rows = read_rows(ROWS)
    planned = [Job(method, regime, JUDGING[0], HIGHER_RATE) for regime in AHEAD for method in TWO_AHEAD]
    planned += [Job(method, CHOOSING_REGIME, CHOOSING, rate) for method in TRIED for rate in RATES[:2]]
    others = tuple(method for method in METHODS if method not in THREE_SEEDS)
    for methods, regimes, seeds in (
        (THREE_SEEDS[:2], ("many_updates", "late"), JUDGING),
        (THREE_SEEDS[2:], ("many_updates", "late"), JUDGING),
        (others, ("many_updates", "late"), JUDGING[:1]),
        (tuple(METHODS), ("gentle",), JUDGING[:1]),
    ):
        planned += [Job(method, CHOOSING_REGIME, CHOOSING, rate) for method in methods for rate in RATES]
        rates = {method: chosen_rate(rows, method) for method in methods}
        for regime in regimes:
            chosen = [(method, rate) for method, rate in rates.items() if rate is not None]
            planned += [Job(method, regime, seed, rate) for seed in seeds for method, rate in chosen]
    planned += [Job(method, "high_rate", seed, HIGHER_RATE) for seed in JUDGING for method in AT_A_HIGH_RATE]
    yield from (job for job in dict.fromkeys(planned) if not any(map(job.is_of, rows)))


def chosen_rate(rows: list[dict[str, Any]], method: str) -> float | None:
    """The rate with the best sampled exact match on the choosing seed; none until all have run."""
    found = [row for row in rows if row["method"] == method and not row["judging"]]
    if {row["learning_rate"] for row in found} < {*RATES}:
        return None
    return float(max(found, key=lambda row: row["final_em"])["learning_rate"])  # of equals, the lowest


def is_free(job: Job) -> bool:
    """Whether this process may make the run."""
    job.folder.mkdir(parents=True, exist_ok=True)
    return claim(job.folder / "claimed", RUNS / "lock")


def sorl(folder: Path, *words: Any) -> float:
    """Run a command of `sorl`; the CPU-seconds that it took."""
    before = os.times()
    with (folder / "log.txt").open("a") as log:
        added = CPU if DEVICE == "cpu" else {}
        done = subprocess.run([*SORL, *map(str, words)], stdout=log, stderr=log, env={**os.environ, **added})
    if done.returncode:
        raise RuntimeError(f"sorl {words[0]} failed with code {done.returncode}: see {folder / 'log.txt'}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def exact_match(policy: Path, output: Path, *words: Any) -> float:
    asked = (RUNS, "--model_name_or_path", policy, "--kv_cache_gib", 0.5)  # several may share a GPU
    sorl(output.parent, "evaluate", *asked, "--output", output, *words)
    scores = [row["exact_match"] for row in read_evaluated(output, "eval")]
    return sum(scores) / len(scores)


def by_hops(evaluation: Path) -> dict[str, dict[str, float]]:
    """Exact match and searches of questions that need one search, and of those that need two."""
    rows = list(read_evaluated(evaluation, "eval"))
    found = {}
    for hops in (1, 2):
        own = [row for row in rows if json.loads(row["metadata"])["hops"] == hops]
        found[str(hops)] = {name: sum(row[name] for row in own) / len(own) for name in ("exact_match", "searches")}
    return found


def shares(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of log entries: the mean share of groups whose rewards agree, and the mean factor of the learning rate."""
    agreeing = [step["frac_reward_zero_std"] for step in steps if "frac_reward_zero_std" in step]
    factors = [step.get("lr_factor", 1.0) for step in steps]
    return {"agreeing_groups": statistics.fmean(agreeing), "lr_factor": statistics.fmean(factors)}


SAMPLED = ("--temperature", 1)


def run(job: Job, started: dict[str, Any]) -> dict[str, Any]:
    """Train, evaluate on 200 questions that nobody trained on, and make the row: greedy answers where it judges."""
    policy, method = job.folder / "policy", {**METHODS, **TRIED}[job.method]
    settings = {"learning_rate": job.learning_rate, "seed": job.seed, "output_dir": policy}
    settings["save_steps"] = 16 if DEVICE == "cpu" else 1000  # to go on from, where a run takes an hour
    settings |= {"steps_per_generation": 8, "kv_cache_gib": 0.5, "log_turn_details": True}
    settings |= {**REGIMES, **AHEAD, **HIGH_RATE}[job.regime]
    settings |= (_OF_PPO if method.get("trainer") == "so_ppo" else {}) | method
    again = {"resume_from_checkpoint": "latest"} if any(policy.glob("checkpoint-*")) else {}
    if not again:
        shutil.rmtree(policy, ignore_errors=True)  # of a run that ended before its first checkpoint
    given = [word for name, value in {**settings, **again}.items() for word in (f"--{name}", value)]
    launch = "single_cpu" if DEVICE == "cpu" else RUNS / "one_gpu.yaml"
    recipe = ("--accelerate_config", launch, "--config", RUNS / "recipe.yaml", "--use_cpu", DEVICE == "cpu")
    seconds = sorl(job.folder, "train", *recipe, "--collapse_guard", "off", *given)
    log = json.loads((policy / "trainer_state.json").read_text())["log_history"]
    steps = [step for step in log if "kl_to_old" in step]
    rewards = [step["reward"] for step in steps if "reward" in step]
    judging = job.seed != CHOOSING
    final = exact_match(policy, job.folder / "sampled", *SAMPLED)
    greedy = exact_match(policy, job.folder / "greedy") if judging else None
    shutil.rmtree(policy)
    best = max(final, *(sum(rewards[i : i + 3]) / 3 for i in range(len(rewards) - 2)))  # one rollout is noise
    return {
        **vars(job),
        "judging": judging,
        "device": DEVICE,
        "policy_parameters": 134_515_008,
        **started,
        "final_em": final,
        "final_greedy_em": greedy,
        "by_hops": by_hops(job.folder / "sampled"),
        "best_em": best,
        "collapsed": final < started["start_em"] or final < best / 2,
        "kl_max": max(step["kl_to_old"] for step in steps),
        "clip_fraction_max": max(step["clip_ratio/region_mean"] for step in steps),
        "clip_fraction": statistics.fmean(step["clip_ratio/region_mean"] for step in steps),
        "effective_sample_size": statistics.fmean(step["effective_sample_size"] for step in steps),
        "age_max": max(step.get("async/age_max", 0) for step in steps),
        "grad_norm_max": max(step["grad_norm"] for step in steps),
        **shares(steps),
        "rollout_rewards": rewards,
        "cpu_seconds": None if again else round(seconds),  # of a run that went on, the rest is not known
    }


def start(model: str) -> dict[str, Any]:
    """Prepare world, warm start and recipe, where they are missing; what rows say of the warm start.

    Made anew it is another policy where a processor rounds otherwise: its digest tells.
    """
    (RUNS / "one_gpu.yaml").write_text(yaml.safe_dump(ONE_GPU))
    if not (RUNS / "recipe.yaml").is_file():
        alone({}, prepare, 0, PRETRAINED, RUNS, model)  # its gigabytes go back with its process
        recipe = RECIPES.find(PRETRAINED.recipe).read_text()
        (RUNS / "recipe.yaml").write_text(recipe.replace(str(PRETRAINED.run), str(RUNS)))
    weights = hashlib.sha256((RUNS / "warm-start" / SAFE_WEIGHTS_NAME).read_bytes()).hexdigest()
    return {"warm_start": weights[:12], "start_em": exact_match(RUNS / "warm-start", RUNS / "sampled", *SAMPLED)}


def main(words: Sequence[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", default="models/smollm2-135m", help="folder that `make model` wrote")
    model = parser.parse_args(words).model
    os.environ["OMP_NUM_THREADS"] = "1"  # of what is started from here
    RUNS.mkdir(parents=True, exist_ok=True)
    with locked(RUNS / "start.lock"):  # the others wait for the warm start
        started = start(model)
    while job := next(filter(is_free, jobs()), None):
        print(f"{datetime.now():%H:%M} {job.folder.name}", flush=True)
        row = run(job, started)
        add_row(row)
        print(f"{datetime.now():%H:%M} {job.folder.name}: {row['final_em']:.3f} sampled", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
