"""How much of the returns' variance could SO-PPO's critic explain, and how much does it?

    python -m benchmarks.critic_ceiling

At policies of the stability benchmark's gentle regime (the warm-started one, and those of an SO-GRPO and an SO-PPO
run with our first defaults), on its choosing seeds:

- the ceiling: 1 − E[Var(R | s_k)] / Var(R), from many continuations of each of a few hundred states s_k in which a
  turn k starts. No function of the state explains more;
- what the critic's own architecture reaches by regression on 1,024 to 16,384 trajectories of the frozen policy;
- what the critic that the SO-PPO run leaves behind explains of fresh trajectories of its own policy.

What is in `runs/critic_ceiling/` already, made with the same settings, is not done again; with `--report`, nothing is
measured. Writes what there is, and what is missing, to `benchmarks/results/critic_ceiling.json` and `.md`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch

from benchmarks.critic_regression import BATCH, LEARNING_RATE, explained, fit, new_critic
from benchmarks.critic_report import write_report
from benchmarks.critic_sampling import FrozenPolicy, Sample, State, sample_of, states_of
from benchmarks.critic_statistics import StateReturns
from benchmarks.stability_grid import CHOOSING_SEEDS, REGIMES, SHORT
from benchmarks.stability_run import Job, build_trainer, prepare, settings_of
from sorl_trl import load_critic
from sorl_trl.command_line import Parser, run_command
from sorl_trl.types import Trajectory

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs/critic_ceiling"
REGIME = "gentle"
POLICIES = ("warm", "so_grpo_first", "so_ppo_first")
"""The policy before RL, and those that a run of a method of the stability benchmark ends with."""
STATES = 256
"""Of each turn index, each of another trajectory."""
CONTINUATIONS = 16
HELD_OUT = 2048
EPOCHS = {1024: 8, 4096: 4, 16384: 2}
"""Trajectories that are regressed on, and how often."""


def made(path: Path, settings: str) -> Any:
    """What `once` has written into `path` with these settings; None if it has not."""
    kept = json.loads(path.read_text()) if path.is_file() else None
    return kept["made"] if isinstance(kept, dict) and kept.get("settings") == settings else None


def once(path: Path, settings: str, make: Callable[[], Any]) -> Any:
    """What `make` gives, as JSON in `path`, with all that decides it; made only if it is not there with the same."""
    if (known := made(path, settings)) is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        started = time.process_time()
        written = path.with_suffix(".part")
        written.write_text(json.dumps({"settings": settings, "made": make()}))
        written.replace(path)
        print(f"{path}: {time.process_time() - started:.0f} CPU-seconds", flush=True)
        known = made(path, settings)
    return known


def job_of(method: str, seed: int) -> Job:
    """The run of a method, which is that of the stability benchmark."""
    return Job(REGIME, method, REGIMES[REGIME].learning_rate, seed)


def settings_of_place(policy: str, seed: int) -> str:
    """What decides the frozen policy and its world."""
    return repr((SHORT.name, SHORT.settings)) if policy == "warm" else settings_of(job_of(policy, seed))


def measurements(policy: str, seed: int) -> dict[str, str]:
    """What there is to measure of a policy -> the settings that it is measured with."""
    place = settings_of_place(policy, seed)
    parts = {"ceiling": repr((place, STATES, CONTINUATIONS, HELD_OUT))}
    if policy == "so_ppo_first":
        parts["critic"] = repr((place, HELD_OUT))
    for size, epochs in EPOCHS.items():
        parts[f"regression-{size}"] = repr((place, size, epochs, HELD_OUT, BATCH, LEARNING_RATE))
    return parts


def train(method: str, seed: int, world: Path) -> Path:
    """The folder of the policy that a gentle run of `method` ends with, its critic beside it."""
    folder = RUNS / f"{method}-{seed}/trained"

    def make() -> dict[str, Any]:
        torch.manual_seed(seed)
        trainer = build_trainer(job_of(method, seed), world, folder)
        trainer.train()
        trainer.save_model(str(folder))
        key = "critic/explained_variance"
        return {"explained_variance": [entry[key] for entry in trainer.state.log_history if key in entry]}

    once(folder / "log.json", settings_of_place(method, seed), make)
    return folder


class Place:
    """A frozen policy of one seed, and what is measured there: a file each."""

    def __init__(self, policy: str, seed: int) -> None:
        self.folder = folder_of(policy, seed)
        self._settings = measurements(policy, seed)
        self._place = settings_of_place(policy, seed)
        self.world = prepare(SHORT, seed, RUNS)
        self.critic = None if policy in ("warm", "so_grpo_first") else train(policy, seed, self.world)
        self.backbone = self.world / "policy"
        trained = self.critic or (self.backbone if policy == "warm" else train(policy, seed, self.world))
        self._frozen = FrozenPolicy(trained, self.world, SHORT)
        self._seed = seed

    def measure(self) -> None:
        regressions = {f"regression-{size}": partial(self._regress, size) for size in EPOCHS}
        ways: dict[str, Callable[[], Any]] = {"ceiling": self._ceiling, "critic": self._reached, **regressions}
        for part, settings in self._settings.items():
            once(self.folder / f"{part}.json", settings, ways[part])

    def _collect(self, count: int, seed: int) -> tuple[list[int], list[Trajectory]]:
        """Trajectories of questions that are drawn with replacement, the same ones for all policies."""
        torch.manual_seed(seed)
        questions = torch.randint(len(self._frozen.questions), (count,)).tolist()
        return questions, self._frozen.trajectories(questions)

    def _held_out(self) -> Sample:
        questions, trajectories = self._collect(HELD_OUT, 0)
        return sample_of(trajectories, self._frozen.rewards(questions, trajectories))

    def _ceiling(self) -> dict[str, Any]:
        questions, trajectories = self._collect(HELD_OUT, 0)
        by_turn: dict[int, list[State]] = {}
        for question, trajectory in zip(questions, trajectories, strict=True):
            for state in states_of(question, trajectory):
                by_turn.setdefault(state.turn, []).append(state)
        by_turn = {k: states for k, states in by_turn.items() if len(states) > 1}  # one has no variance
        torch.manual_seed(1)
        # Of every turn the next trajectories in line, so that few of them give states of two turns.
        drawn = {k: states[k * STATES % max(1, len(states) - STATES) :][:STATES] for k, states in by_turn.items()}
        returns = {k: self._frozen.continued_returns(states, CONTINUATIONS) for k, states in sorted(drawn.items())}
        rewards = self._frozen.rewards(questions, trajectories)
        measured = StateReturns([r.numpy() for r in returns.values()], [len(by_turn[k]) for k in returns])
        return {"sampled_em": statistics.fmean(rewards), **asdict(measured.estimate())}

    def _regress(self, size: int) -> list[dict[str, Any]]:
        torch.manual_seed(self._seed)
        held_out = self._held_out()
        questions, trajectories = self._collect(size, 2)
        sample = sample_of(trajectories, self._frozen.rewards(questions, trajectories))
        critic = new_critic(self.backbone)
        return [
            {"epoch": epoch, **asdict(explained(critic, held_out))} for epoch in fit(critic, sample, EPOCHS[size], 0)
        ]

    def _reached(self) -> dict[str, Any]:
        assert self.critic is not None
        log = made(self.critic / "log.json", self._place)["explained_variance"]
        return {"during": log, **asdict(explained(load_critic(self.critic), self._held_out()))}


def folder_of(policy: str, seed: int) -> Path:
    return RUNS / f"{policy}-{seed}"


def read(policy: str, seed: int) -> dict[str, Any]:
    """What has been measured of a place, None for what has not."""
    folder = folder_of(policy, seed)
    parts = {name: made(folder / f"{name}.json", with_) for name, with_ in measurements(policy, seed).items()}
    curves = {size: parts[f"regression-{size}"] for size in EPOCHS}
    return {
        "policy": policy,
        "seed": seed,
        "ceiling": parts["ceiling"],
        "regression": {size: curve for size, curve in curves.items() if curve is not None},
        "critic": parts.get("critic"),
        "missing": [name for name, part in parts.items() if part is None],
    }


def main(words: Sequence[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(CHOOSING_SEEDS))
    parser.add_argument("--policies", choices=POLICIES, nargs="+", default=list(POLICIES))
    parser.add_argument("--report", action="store_true", help="measure nothing, report on what has been measured")
    arguments = parser.parse_args(words)
    places = [(policy, seed) for seed in arguments.seeds for policy in arguments.policies]
    if not arguments.report:
        torch.set_num_threads(1)
        for policy, seed in places:
            Place(policy, seed).measure()
    measured = [read(policy, seed) for policy, seed in places]
    write_report(measured)


if __name__ == "__main__":
    sys.exit(run_command(main))
