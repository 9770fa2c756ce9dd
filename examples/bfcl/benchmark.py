"""A pretrained language model learns to call functions in the leaderboard's worlds: before and after RL.

SmolLM2-135M-Instruct imitates the solutions of some short tasks, is trained on others by the environment's reward, and
is evaluated on yet others, with SO-GRPO and GRPO (`examples/bfcl/smollm2.yaml`).

    python -m examples.quickstart.model smollm2-135m models/smollm2-135m
    python -m examples.bfcl.benchmark

A run that is in `benchmarks/results/bfcl.json` is not made again, and one that was interrupted goes on from its
checkpoint. Several of these commands may work side by side: each takes runs that nobody works on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import alone, claim, locked, read_rows, sorl
from benchmarks.common import write_rows as write_results
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.bfcl.environment import BFCLEnvironment
from examples.bfcl.solutions import solved_examples
from examples.bfcl.tasks import BFCL_SETS, Task, load_tasks, rows_of, task_of, write_rows
from examples.quickstart import imitate, store_policy
from sorl_trl.files import write_whole
from sorl_trl.records import RECIPE_FILE
from sorl_trl.records.evaluated import read_evaluated
from sorl_trl.rollout import RolloutLimits
from sorl_trl.types import Action, ActionKind, Turn

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "bfcl.json"
RUNS = Path("runs/bfcl")
LOCK = RUNS / "lock"
RECIPE = Path(__file__).with_name("smollm2.yaml")
SEEDS = (11, 12, 13)
METHODS = ("so_grpo", "grpo")
LIMITS = RolloutLimits(max_turns=8, max_turn_tokens=160, max_observation_tokens=96, max_trajectory_tokens=560)
SHORT, SHORTER = 320, 240
"""Tokens of a task that is solved, its prompt included; of those that are trained on, to save time."""
TRIES = 8
"""Of the warm start at each task to train on: those that it solves now and then are kept, for others teach nothing."""
STEPS, BATCH, RATE = 16, 8, 5e-5
"""Of imitation."""


def split(tokenizer: Any) -> dict[str, list[Task]]:
    """The first request of each task of the base set, and the first two, by the task's number modulo four.

    Every fourth task is held out, every fourth imitated, and the others are trained on; of each kind those that are
    solved in few tokens.
    """
    base = load_tasks("base")
    parts: dict[str, list[Task]] = {"eval": [], "imitated": [], "train": []}
    for number, task in enumerate(base):
        name = {0: "eval", 1: "imitated"}.get(number % 4, "train")
        parts[name] += [task.shortened(requests) for requests in (1, 2) if requests <= len(task.requests)]
    return {name: _short(tokenizer, tasks, SHORTER if name == "train" else SHORT) for name, tasks in parts.items()}


def _short(tokenizer: Any, tasks: Sequence[Task], most: int) -> list[Task]:
    examples = solved_examples(tokenizer, tasks, LIMITS, compact=True)
    return [task for task, each in zip(tasks, examples, strict=True) if len(each.input_ids) <= most]


def prepare(model_name: str) -> None:
    """Write tasks and warm start, where they are missing."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_name)
    parts = split(tokenizer)
    RUNS.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(RECIPE, RUNS / RECIPE_FILE)
    for name, file in {"eval": "eval", "train": "candidates"}.items():
        write_rows(rows_of(parts[name], compact=True), RUNS / f"{file}.jsonl")
    for name, rests in {"train": (1, 2, 3), "eval": (0,)}.items():
        whole = [task for each in BFCL_SETS for i, task in enumerate(load_tasks(each)) if i % 4 in rests]
        write_rows(rows_of(whole), RUNS / f"whole-{name}.jsonl")
    if not (RUNS / "warm-start").is_dir():
        model: Any = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
        examples = solved_examples(tokenizer, parts["imitated"], LIMITS, compact=True)
        imitate(model, examples, STEPS, BATCH, RATE, seed=0, warmup_steps=4)
        store_policy(model, tokenizer, RUNS / "warm-start")


def choose() -> None:
    """Write the tasks to train on: those of the candidates that the warm start solves now and then."""
    tried = RUNS / "candidates"
    words = ("--temperature", 1, "--num_samples", TRIES, "--questions", RUNS / "candidates.jsonl")
    sorl(RUNS, "evaluate", RUNS, "--model_name_or_path", RUNS / "warm-start", "--output", tried, *words)
    rows = list(read_evaluated(tried, "candidates"))
    solved = {name: [row["correct"] for row in rows if row["question_id"] == name] for name in _ids(rows)}
    kept = [name for name, correct in solved.items() if 0 < sum(correct) < TRIES]
    write_rows(rows_of(map(task_of, kept), compact=True), RUNS / "train.jsonl")
    print(f"{len(kept)} of {len(solved)} tasks are solved now and then", flush=True)


def _ids(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["question_id"] for row in rows))


def measured(policy: Path, output: Path, *words: Any) -> dict[str, float]:
    """What `sorl evaluate` finds on the held-out tasks."""
    sorl(output.parent, "evaluate", RUNS, "--model_name_or_path", policy, "--output", output, *words)
    rows = list(read_evaluated(output, "eval"))
    found = [json.loads(row["environment"]) for row in rows]
    names = ("solved", "requests_solved", "calls_per_request", "wrong_call", "failed_call")
    return {name: sum(each[name] for each in found) / len(found) for name in names} | {"tasks": len(rows)}


def both(policy: Path, folder: Path) -> dict[str, dict[str, float]]:
    sampled = measured(policy, folder / "sampled", "--temperature", 1, "--num_samples", 4)
    return {"greedy": measured(policy, folder / "greedy"), "sampled": sampled}


def run(method: str, seed: int) -> dict[str, Any]:
    folder = RUNS / f"{method}-{seed}"
    folder.mkdir(exist_ok=True)
    policy = folder / "policy"
    words: list[Any] = ["--config", RECIPE, "--accelerate_config", "single_cpu"]
    words += ["--output_dir", policy, "--seed", seed]
    words += ["--collapse_guard", "off", *(() if method == "so_grpo" else ("--method", method))]
    if any(policy.glob("checkpoint-*")):
        words += ["--resume_from_checkpoint", "latest"]
    else:
        shutil.rmtree(policy, ignore_errors=True)  # of a run that ended before its first checkpoint
    seconds = sorl(folder, "train", *words)
    log = json.loads((policy / "trainer_state.json").read_text())["log_history"]
    rollouts = [entry for entry in log if "environment/solved" in entry]
    row = {
        "method": method,
        "seed": seed,
        **both(policy, folder),
        "rollout_solved": [entry["environment/solved"] for entry in rollouts],
        "rollout_rewards": [entry["reward"] for entry in rollouts],
        "kl_max": max(entry["kl_to_old"] for entry in log if "kl_to_old" in entry),
        "clip_fraction_max": max(entry.get("clip_ratio/region_mean", 0.0) for entry in log),
        "cpu_seconds": round(seconds),
    }
    shutil.rmtree(policy)
    return row


def add(row: dict[str, Any]) -> None:
    """With the table of all rows."""
    with locked(LOCK):
        rows = [*read_rows(FILE), row]
        rows.sort(key=lambda row: (row["method"] != "warm_start", row["method"], row["seed"]))
        write_results(rows, FILE)
        write_whole(FILE.with_suffix(".md"), table(rows).encode())


def is_made(method: str, seed: int) -> bool:
    return any((row["method"], row["seed"]) == (method, seed) for row in read_rows(FILE))


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "# Short tasks of the leaderboard, before and after RL",
        "",
        "`python -m examples.bfcl.benchmark`: SmolLM2-135M-Instruct, held-out tasks of one or two requests; the share",
        "solved, greedy and sampled (four trajectories a task), and the share of requests. Training compared turns",
        "with one mean per group, whatever their index, as the code did when these runs were made.",
        "",
        "| | seed | solved, greedy | solved, sampled | requests, sampled | rollouts | CPU-seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rollouts = " ".join(f"{value:.2f}" for value in row["rollout_solved"]) or "-"
        scores = [f"{row[mode][name]:.3f}" for mode, name in _COLUMNS]
        lines.append(f"| {row['method']} | {row['seed']} | {' | '.join(scores)} | {rollouts} | {row['cpu_seconds']} |")
    return "\n".join(lines) + "\n"


_COLUMNS = (("greedy", "solved"), ("sampled", "solved"), ("sampled", "requests_solved"))


def replay() -> None:
    """Say what a call costs: all solutions, with the check after each request."""
    messages = [
        (task, f"[{', '.join(calls)}]" if calls else "", len(calls))
        for name in BFCL_SETS
        for task in load_tasks(name)
        for calls in task.solution
    ]
    began, environments = time.process_time(), {}
    for task, calls, _ in messages:
        if task.id not in environments:
            environments[task.id] = BFCLEnvironment()
            environments[task.id].reset(task.id)
        for text in filter(None, (calls, "Done.")):
            environments[task.id].step(Turn((), text, Action(ActionKind.MESSAGE, text)))
    seconds, calls = time.process_time() - began, sum(number for _, _, number in messages)
    assert all(environment.solved for environment in environments.values())
    print(
        f"{len(environments)} tasks, {calls} calls: {1000 * seconds / calls:.2f} ms a call, worlds and checks included"
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m", help="folder that `make model` wrote")
    parser.add_argument("--split", action="store_true", help="write the files of tasks and the warm start, no more")
    parser.add_argument("--replay", action="store_true", help="time the worlds, no more")
    arguments = parser.parse_args(words)
    if arguments.replay:
        return replay()
    RUNS.mkdir(parents=True, exist_ok=True)
    with locked(RUNS / "start.lock"):  # the others wait for the warm start
        alone({}, prepare, arguments.model)
        if arguments.split:
            return
        if not (RUNS / "train.jsonl").is_file():
            choose()
        if not is_made("warm_start", 0):
            start = both(RUNS / "warm-start", RUNS)
            add({"method": "warm_start", "seed": 0, **start, "rollout_solved": [], "cpu_seconds": 0})
    for seed in SEEDS:
        for method in METHODS:
            if claim(RUNS / f"{method}-{seed}.claimed", LOCK) and not is_made(method, seed):
                add(run(method, seed))


if __name__ == "__main__":
    main()
