"""Does SO-PPO learn as far as SO-GRPO, and does its critic explain anything?

    python -m benchmarks.so_ppo_learning

Trains each recipe in `METHODS` on the sandbox's atlas, once per seed: its own world, warm-started policy and random
numbers, the same number of trajectories for all. The policy is that of `WarmStartConfig`, with turns of four tokens,
and not the quickstart's, which thinks before it acts. Then it asks the policies questions that nobody trained on. No
setting was chosen on these seeds. Runs that are in `runs/so_ppo_learning/` already are not repeated: a row that is new
or was interrupted is all that another call trains. Then methods are compared at the same number of generated tokens,
warm-up included.

Writes `benchmarks/results/so_ppo_learning.json` and `.md`, and `docs/so_ppo_explained_variance.png`.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from argparse import SUPPRESS, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from benchmarks.token_budgets import budget_table, curve_of
from sorl_trl.command_line import Parser, at_least, run_command

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs/so_ppo_learning"
RESULTS = Path(__file__).parent / "results"
PICTURE = ROOT / "docs/so_ppo_explained_variance.png"
METHODS = {
    "before": "before RL",
    "ppo": "PPO",
    "turn_ppo": "Turn-PPO",
    "s_ppo": "S-PPO",
    "st_ppo": "ST-PPO",
    "so_ppo": "SO-PPO",
    "so_ppo_head": "SO-PPO, head",
    "so_ppo_warm_up": "SO-PPO, warm-up of 8 rollouts",
    "so_ppo_pretrained": "SO-PPO, pretrained critic",
    "so_grpo": "SO-GRPO",
}
"""Recipe, or one with a change in `CHANGES`, and what the table calls it; "before" is the warm-started policy."""
CHANGES = {
    "so_ppo_head": ["so_ppo", "--critic", "head", "--critic_learning_rate", "5e-3"],
    "so_ppo_warm_up": ["so_ppo", "--critic_warmup_steps", "64"],
    "so_ppo_pretrained": ["so_ppo", "--critic_warmup_steps", "0"],
}
PRETRAINED = "so_ppo_pretrained"
"""Its critic comes from a run of its own, in which the policy stands still."""
PRETRAINING = ["so_ppo", "--critic_warmup_steps", "128", "--max_steps", "128"]
"""16 rollouts, where the run has 30."""
TRAJECTORIES = 128
"""Per rollout, in all recipes."""
LAST = 10
"""Rollouts at the end over which training metrics are averaged."""
COLUMNS = {
    "sampled_em": "sampled EM",
    "greedy_em": "greedy EM",
    "clip_fraction/token": "clip fraction",
    "kl_to_old": "KL to old",
    "grad_norm": "gradient norm",
    "critic/explained_variance": "explained variance",
    "critic/turn_0/explained_variance": "of turn 0",
    "critic/turn_1/explained_variance": "of turn 1",
    "critic/turn_2/explained_variance": "of turn 2",
}


def prepare_world(seed: int) -> Path:
    """World and index of one seed, as the quickstart makes them, and a warm-started policy."""
    from sorl_trl.cli import quickstart
    from sorl_trl.sandbox import WarmStartConfig

    folder = RUNS / f"world-{seed}"
    if not (folder / "warm-start").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        quickstart.prepare("atlas", seed, folder, ROOT / quickstart.CACHE, WarmStartConfig())
    return folder


def train(changed: Sequence[str], seed: int, world: Path, output: Path) -> list[dict[str, Any]]:
    """One run of a recipe with changes; returns its log, an entry per optimizer step."""
    from sorl_trl.recipe import build_trainer, parse_arguments
    from sorl_trl.sandbox import LIMITS

    recipe, *changes = changed
    paths = {"train_questions": world / "world/train.jsonl", "corpus": world / "world/corpus.jsonl"}
    paths |= {"model_name_or_path": world / "warm-start", "output_dir": output}
    words = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    words += ["--seed", str(seed), "--disable_tqdm", "true", *changes]
    words += ["--max_turn_tokens", str(LIMITS.max_turn_tokens)]
    words += ["--max_completion_length", str(LIMITS.max_trajectory_tokens)]
    trainer = build_trainer(parse_arguments(["--config", str(ROOT / f"recipes/{recipe}.yaml"), *words]))
    trainer.train()
    trainer.save_model(str(output))
    return trainer.state.log_history


def logs_of(method: str, seed: int, world: Path, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Train what there is to train; the log, and that of the critic's own run if there is one."""
    changed = CHANGES.get(method, [method])
    if method == "before":
        return {"log": []}
    if method != PRETRAINED:
        return {"log": train(changed, seed, world, folder / "policy")}
    pretraining = train(PRETRAINING, seed, world, folder / "pretraining")
    start = ["--critic_model_name_or_path", str(folder / "pretraining")]
    return {"log": train([*changed, *start], seed, world, folder / "policy"), "pretraining": pretraining}


def settings_of(method: str) -> list[str]:
    """What decides a run: its recipe as it is, its changes, and those of its critic's own run."""
    recipe, *changes = CHANGES.get(method, [method])
    path = ROOT / f"recipes/{recipe}.yaml"
    return [path.read_text() if path.is_file() else recipe, *changes, *(PRETRAINING if method == PRETRAINED else [])]


def is_done(method: str, seed: int) -> bool:
    """Whether the run is there, made with today's settings."""
    path = RUNS / f"{method}-{seed}/result.json"
    return path.is_file() and json.loads(path.read_text()).get("settings") == settings_of(method)


def run(method: str, seed: int) -> None:
    """Train and evaluate, and leave `result.json`."""
    import torch

    from sorl_trl.cli import quickstart
    from sorl_trl.sandbox import LIMITS
    from sorl_trl.search import BM25Index

    torch.set_num_threads(1)
    folder = RUNS / f"{method}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    world = prepare_world(seed)
    policy = world / "warm-start" if method == "before" else folder / "policy"
    logs = logs_of(method, seed, world, folder)
    search = BM25Index.load(quickstart.index_directory(world))
    evaluated = quickstart.evaluate_policy(policy, world, search, LIMITS)
    result = {"method": method, "seed": seed, "settings": settings_of(method)}
    result |= {**quickstart.summarize(evaluated), **logs}
    folder.mkdir(exist_ok=True)
    (folder / "result.part").write_text(json.dumps(result))
    (folder / "result.part").replace(folder / "result.json")


def run_all(methods: Iterable[str], seeds: Iterable[int], workers: int) -> None:
    """Every run that is not there yet, each in a process of one thread."""
    jobs = [(method, seed) for seed in seeds for method in methods if not is_done(method, seed)]

    def launch(job: tuple[str, int]) -> None:
        method, seed = job
        command = [sys.executable, "-m", "benchmarks.so_ppo_learning", "--run", method, str(seed)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{method}, seed {seed} failed:\n{done.stderr[-3000:]}")
        print(f"{METHODS[method]}, seed {seed}: done", flush=True)

    for seed in sorted({seed for _, seed in jobs}):
        prepare_world(seed)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(launch, jobs))


def at_the_end(result: Mapping[str, Any], column: str) -> float | None:
    """A figure of one run: of the evaluation, or of training's last rollouts."""
    if column in result:
        return float(result[column])
    values = [entry[column] for entry in result["log"] if entry.get(column) is not None]
    # A rollout's metrics stand at its first step, a loss's at every step.
    per_rollout = 1 if column.startswith("critic/") else 8
    return statistics.fmean(values[-LAST * per_rollout :]) if values else None


def summarize(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per method: mean over seeds, and each seed's figure."""
    rows = []
    for method, name in METHODS.items():
        runs = [result for result in results if result["method"] == method]
        row: dict[str, Any] = {"method": name, "seeds": [result["seed"] for result in runs]}
        for column in COLUMNS:
            figures = [at_the_end(result, column) for result in runs]
            known = [figure for figure in figures if figure is not None]
            row[column] = statistics.fmean(known) if known else None
            row[f"{column} by seed"] = figures
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| method | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        cells = []
        for column in COLUMNS:
            by_seed = [f"{figure:.3f}" for figure in row[f"{column} by seed"] if figure is not None]
            cells.append(f"{row[column]:.3f} ({', '.join(by_seed)})" if by_seed else "")
        lines.append(f"| {row['method']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(results: list[dict[str, Any]]) -> None:
    """Explained variance over training, a panel per method with a critic, a thin line per seed and their mean."""
    from matplotlib.figure import Figure

    methods = [m for m in METHODS if m not in ("before", "so_grpo")]
    rows = -(-len(methods) // 3)
    figure = Figure(figsize=(12, 3 * rows), layout="constrained")
    axes = figure.subplots(rows, 3, sharex=True, sharey=True).flat
    for axis in axes[len(methods) :]:
        axis.set_visible(False)
    for axis, method in zip(axes, methods, strict=False):
        curves = [
            [entry["critic/explained_variance"] for entry in result["log"] if "critic/explained_variance" in entry]
            for result in results
            if result["method"] == method
        ]
        curves = [[float("nan") if value is None else value for value in curve] for curve in curves]
        for curve in curves:
            axis.plot(range(1, len(curve) + 1), curve, color="tab:blue", alpha=0.3, linewidth=1)
        mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        axis.plot(range(1, len(mean) + 1), mean, color="tab:blue", linewidth=2)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_title(METHODS[method], fontsize=10)
        axis.grid(alpha=0.3)
    figure.supxlabel("rollout (128 trajectories each)", fontsize=9)
    figure.supylabel("explained variance of the reward-to-go", fontsize=9)
    figure.suptitle("The critic on unseen trajectories: thin lines are seeds, thick ones their mean")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


def same_tokens(results: list[dict[str, Any]]) -> str:
    """The reward in training at equal numbers of generated tokens, and how far each method is ahead of SO-GRPO."""
    logs: dict[str, list[list[dict[str, Any]]]] = {}
    for method, name in METHODS.items():
        runs = [result for result in results if result["method"] == method and method != "before"]
        if runs:
            logs[name] = [run["log"] for run in runs]
        if method == PRETRAINED:
            logs[f"{name}, its run counted"] = [run["pretraining"] + run["log"] for run in runs]
    curves = {name: [curve_of(log, TRAJECTORIES) for log in each] for name, each in logs.items()}
    header = (
        "\n## With the same number of generated tokens\n\n"
        "Reward in training, the mean of the last rollouts that the tokens pay for; in brackets how far it is ahead "
        "of SO-GRPO, paired by seed, with a 95 % interval (Student's t). A pretrained critic serves all runs that "
        "start from the same policy, so that its own run is counted in one row and not in the other.\n\n"
    )
    return header + budget_table(curves, METHODS["so_grpo"])


def report(seeds: list[int]) -> None:
    paths = [RUNS / f"{method}-{seed}/result.json" for method in METHODS for seed in seeds]
    results = [json.loads(path.read_text()) for path in paths]
    rows = summarize(results)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "so_ppo_learning.json").write_text(json.dumps(rows, indent=2) + "\n")
    text = table(rows)
    header = (
        "# What each method learns\n\n"
        f"Means over seeds {', '.join(map(str, seeds))} (each seed's figure in brackets): EM on 400 unseen questions, "
        f"sampled four times and greedy, after 30 rollouts of {TRAJECTORIES} trajectories; the other columns over the "
        f"last {LAST} rollouts. Written by `python -m benchmarks.so_ppo_learning`.\n\n"
    )
    text += same_tokens(results)
    (RESULTS / "so_ppo_learning.md").write_text(header + text)
    draw(results)
    print(text)


def main(words: Sequence[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--methods", choices=METHODS, nargs="+", help="train these alone, and write no report")
    parser.add_argument("--workers", type=at_least(1), default=max(1, (os.cpu_count() or 2)), help="runs at a time")
    parser.add_argument("--run", nargs=2, metavar=("METHOD", "SEED"), help=SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.run:
        run(arguments.run[0], int(arguments.run[1]))
        return
    run_all(arguments.methods or METHODS, arguments.seeds, arguments.workers)
    if not arguments.methods:
        report(arguments.seeds)


if __name__ == "__main__":
    sys.exit(run_command(main))
