"""Which ways to train SO-PPO's critic would have explained more of the same run?

    python -m benchmarks.critic_trials

Records the trajectories of an SO-PPO run with our first defaults (the stability benchmark's gentle regime, its
choosing seeds), then trains critics on them in the order in which they came, as the run does or otherwise
(`VARIANTS`). Each is judged by every rollout before it has seen it. The policy is the run's in all of them: what is
compared are critics alone.

What is in `runs/critic_ceiling/` already is not done again; with `--report`, nothing is trained, and what there is is
reported. Writes `benchmarks/results/critic_trials.json` and `.md`.
"""

from __future__ import annotations

import json
import statistics
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.critic_ceiling import REGIME, RUNS, job_of, made, once
from benchmarks.critic_learning import Learner, Variant
from benchmarks.critic_regression import BATCH, LEARNING_RATE, explained_by, fit, new_critic
from benchmarks.critic_sampling import FrozenPolicy, Sample, joined, sample_from, sample_of
from benchmarks.method_settings import PPO_SETTINGS
from benchmarks.stability_grid import CHOOSING_SEEDS, REGIMES, SHORT
from benchmarks.stability_run import build_trainer, prepare, settings_of
from sorl_trl.command_line import Parser, run_command

RESULTS = Path(__file__).parent / "results"
EARLY, LATE = slice(1, 6), slice(6, None)
"""Rollouts: the first is judged by a critic that is 0 everywhere, unless it was pretrained."""
PRETRAINING_EPOCHS = 3
VARIANTS = {
    "run": Variant("as in the run"),
    "slow": Variant("learning rate 3e-4", learning_rate=3e-4),
    "fast": Variant("learning rate 3e-3", learning_rate=3e-3),
    "extra_passes": Variant("4 more passes over each rollout", extra_passes=4),
    "replay": Variant("8 more updates on earlier rollouts", replayed=8),
    "replay_slow": Variant("24 more, learning rate 3e-4", replayed=24, learning_rate=3e-4),
    "lambda": Variant("lambda 0.9", gae_lambda=0.9),
    "logistic": Variant("logistic loss", cross_entropy=True),
    "normalized": Variant("return normalization (PopArt)", normalized=0.1),
    "pretrained_1k": Variant("pretrained on 1,024 trajectories", pretrained=1024),
    "pretrained": Variant("pretrained on 4,096 trajectories", pretrained=4096),
    "pretrained_replay": Variant("… and 8 more updates on earlier rollouts", pretrained=4096, replayed=8),
    "pretrained_lambda": Variant("… and lambda 0.9", pretrained=4096, gae_lambda=0.9),
    "pretrained_frozen": Variant("… and not trained in the run", pretrained=4096, passes=0),
}


def record(seed: int, world: Path, path: Path) -> list[Sample]:
    """The rollouts of an SO-PPO run, in order; in `path` once it has been run with today's settings."""
    job = job_of("so_ppo_first", seed)
    kept = torch.load(path) if path.is_file() else {}
    if kept.get("settings") != settings_of(job):
        trainer: Any = build_trainer(job, world, path.parent / "recorded")
        rollouts: list[Sample] = []
        collect = trainer._add_advantages

        def add_advantages(output: dict[str, Any], rollout: Any) -> None:
            collect(output, rollout)
            if trainer.model.training:
                rollouts.append(_sample(output, rollout.turn_rewards.sum(1)))

        trainer._add_advantages = add_advantages
        trainer.train()
        written = path.with_suffix(".part")
        kept = {"settings": settings_of(job), "rollouts": [vars(rollout) for rollout in rollouts]}
        torch.save(kept, written)
        written.replace(path)
    return [Sample(**columns) for columns in kept["rollouts"]]


def settings_of_trial(name: str, seed: int) -> str:
    """All that decides what a variant explains of the run of a seed."""
    run = settings_of(job_of("so_ppo_first", seed))
    return repr((run, VARIANTS[name], PRETRAINING_EPOCHS, BATCH, LEARNING_RATE))


def _sample(output: dict[str, Tensor], rewards: Tensor) -> Sample:
    texts, starts = [], []
    for i, turn_ids in enumerate(output["turn_ids"]):
        prompt = output["prompt_ids"][i][output["prompt_mask"][i].bool()]
        texts.append(torch.cat([prompt, output["completion_ids"][i][output["completion_mask"][i].bool()]]))
        first = [int((turn_ids == k).nonzero()[0]) for k in range(int(turn_ids.max()) + 1)]
        starts.append(len(prompt) - 1 + torch.tensor(first, dtype=torch.long))
    return sample_from(texts, starts, rewards.float())


def train(variant: Variant, seed: int) -> dict[str, Any]:
    """What a variant explains of the run, early and late, over all turns and by turn."""
    world = prepare(SHORT, seed, RUNS)
    rollouts = record(seed, world, RUNS / f"rollouts-{seed}.pt")
    torch.manual_seed(0)
    critic = new_critic(world / "policy")
    if variant.pretrained:
        policy = FrozenPolicy(world / "policy", world, SHORT)
        questions = torch.randint(len(policy.questions), (variant.pretrained,)).tolist()
        trajectories = policy.trajectories(questions)
        sample = sample_of(trajectories, policy.rewards(questions, trajectories))
        for _ in fit(critic, sample, PRETRAINING_EPOCHS, 0):
            pass
    learner = Learner(critic, variant)
    values: list[Tensor] = []
    for rollout in rollouts:
        values.append(learner.values(rollout))
        learner.learn(rollout)
    return {name: _judge(values[part], rollouts[part]) for name, part in (("early", EARLY), ("late", LATE))}


def _judge(values: Sequence[Tensor], rollouts: Sequence[Sample]) -> dict[str, Any]:
    width = max(each.shape[1] for each in values)
    pooled = torch.cat([pad(each, (0, width - each.shape[1])) for each in values])
    return asdict(explained_by(pooled, joined(rollouts)))


def write_report(seeds: Sequence[int]) -> None:
    rows = []
    for name, variant in VARIANTS.items():
        paths = {seed: RUNS / f"trials-{seed}/{name}.json" for seed in seeds}
        found = {seed: made(path, settings_of_trial(name, seed)) for seed, path in paths.items()}
        if known := {seed: trial for seed, trial in found.items() if trial is not None}:
            rows.append({"variant": variant.title, "seeds": list(known), "explained": list(known.values())})
    (RESULTS / "critic_trials.json").write_text(json.dumps(rows, indent=1).replace("NaN", "null") + "\n")
    measured = sorted({seed for row in rows for seed in row["seeds"]})
    regime, rate = REGIMES[REGIME], PPO_SETTINGS["critic_learning_rate"]
    text = (
        "# Ways to train the critic\n\n"
        "Explained variance of the return: critics trained on the recorded rollouts of one SO-PPO run (first "
        "defaults) per seed "
        f"({', '.join(map(str, measured))}, which chose settings), each judged by every rollout before it saw it. The "
        f"run has {regime.rollouts} rollouts of {regime.trajectories} trajectories, {regime.epochs} passes over each, "
        f"and its critic a learning rate of {rate:g}. Early: rollouts 2 to 6, late: the others. Several seeds are "
        "averaged, with each one's figure in brackets. Written by `python -m benchmarks.critic_trials`.\n\n"
    )
    text += _table(rows)
    (RESULTS / "critic_trials.md").write_text(text)
    print(text)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| critic | seeds | early | late | late, turn 0 | turn 1 | turn 2 |", "|---" * 7 + "|"]
    for row in rows:
        late = [each["late"] for each in row["explained"]]
        columns = [[each["early"]["overall"] for each in row["explained"]], [each["overall"] for each in late]]
        columns += [[each["by_turn"][k] for each in late] for k in range(3)]
        cells = [row["variant"], str(len(row["seeds"])), *map(_cell, columns)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(figures: Sequence[float]) -> str:
    each = f" ({', '.join(f'{figure:.2f}' for figure in figures)})" if len(figures) > 1 else ""
    return f"{statistics.fmean(figures):.2f}{each}"


def main(words: Sequence[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(CHOOSING_SEEDS))
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    parser.add_argument("--report", action="store_true", help="train nothing, report on what has been trained")
    arguments = parser.parse_args(words)
    if not arguments.report:
        torch.set_num_threads(1)
        for seed in arguments.seeds:
            for name in arguments.variants:
                settings = settings_of_trial(name, seed)
                once(RUNS / f"trials-{seed}/{name}.json", settings, partial(train, VARIANTS[name], seed))
    write_report(arguments.seeds)


if __name__ == "__main__":
    sys.exit(run_command(main))
