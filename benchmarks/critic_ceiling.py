"""How much of the returns' variance could SO-PPO's critic explain, and how much does it?

    python -m benchmarks.critic_ceiling

At policies of the stability benchmark's gentle regime (the warm-started one, and those of an SO-GRPO and an SO-PPO
run), on its choosing seeds:

- the ceiling: 1 − E[Var(R | s_k)] / Var(R), from many continuations of each of a few hundred states s_k in which a
  turn k starts. No function of the state explains more;
- what the critic's own architecture reaches by regression on 1,024 to 16,384 trajectories of the frozen policy;
- what the critic that the SO-PPO run leaves behind explains of fresh trajectories of its own policy.

What is in `runs/critic_ceiling/` already is not done again; with `--report`, nothing is measured, and what there is is
reported. Writes `benchmarks/results/critic_ceiling.json` and `.md`.
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

from benchmarks.critic_regression import explained, fit, new_critic
from benchmarks.critic_report import write_report
from benchmarks.critic_sampling import FrozenPolicy, Sample, State, sample_of, states_of
from benchmarks.critic_statistics import StateReturns
from benchmarks.stability_grid import CHOOSING_SEEDS, REGIMES, SHORT
from benchmarks.stability_run import Job, build_trainer, prepare
from sorl_trl import load_critic
from sorl_trl.command_line import Parser, run_command
from sorl_trl.types import Trajectory

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs/critic_ceiling"
REGIME = "gentle"
POLICIES = ("warm", "so_grpo", "so_ppo")
"""The policy before RL, and those that a run of a method of the stability benchmark ends with."""
STATES = 256
"""Of each turn index, each of another trajectory."""
CONTINUATIONS = 16
HELD_OUT = 2048
EPOCHS = {1024: 8, 4096: 4, 16384: 2}
"""Trajectories that are regressed on, and how often."""


def once(path: Path, make: Callable[[], Any]) -> Any:
    """What `make` gives, as JSON in `path`; made only if it is not there."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        started = time.process_time()
        made = make()
        written = path.with_suffix(".part")
        written.write_text(json.dumps(made))
        written.replace(path)
        print(f"{path.relative_to(RUNS)}: {time.process_time() - started:.0f} CPU-seconds", flush=True)
    return json.loads(path.read_text())


def train(method: str, seed: int, world: Path) -> Path:
    """The folder of the policy that a gentle run of `method` ends with, its critic beside it."""
    folder = RUNS / f"{method}-{seed}/trained"

    def make() -> dict[str, Any]:
        torch.manual_seed(seed)
        trainer = build_trainer(Job(REGIME, method, REGIMES[REGIME].learning_rate, seed), world, folder)
        trainer.train()
        trainer.save_model(str(folder))
        key = "critic/explained_variance"
        return {"explained_variance": [entry[key] for entry in trainer.state.log_history if key in entry]}

    once(folder / "log.json", make)
    return folder


class Place:
    """A frozen policy of one seed, and what is measured there: a file each."""

    def __init__(self, policy: str, seed: int) -> None:
        self.folder = folder_of(policy, seed)
        self.world = prepare(SHORT, seed, RUNS)
        self.critic = None if policy in ("warm", "so_grpo") else train(policy, seed, self.world)
        self.backbone = self.world / "policy"
        trained = self.critic or (self.backbone if policy == "warm" else train(policy, seed, self.world))
        self._frozen = FrozenPolicy(trained, self.world, SHORT)
        self._seed = seed

    def measure(self) -> None:
        once(self.folder / "ceiling.json", self._ceiling)
        if self.critic:
            once(self.folder / "critic.json", self._reached)
        for size in EPOCHS:
            once(self.folder / f"regression-{size}.json", partial(self._regress, size))

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
        log = json.loads((self.critic / "log.json").read_text())["explained_variance"]
        return {"during": log, **asdict(explained(load_critic(self.critic), self._held_out()))}


def folder_of(policy: str, seed: int) -> Path:
    return RUNS / f"{policy}-{seed}"


def read(policy: str, seed: int) -> dict[str, Any]:
    """What has been measured of a place, None for what has not."""

    def part(name: str) -> Any:
        path = folder_of(policy, seed) / f"{name}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    curves = {size: part(f"regression-{size}") for size in EPOCHS}
    known = {size: curve for size, curve in curves.items() if curve is not None}
    return {
        "policy": policy,
        "seed": seed,
        "ceiling": part("ceiling"),
        "regression": known,
        "critic": part("critic"),
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
    write_report([place for place in measured if place["ceiling"] is not None])


if __name__ == "__main__":
    sys.exit(run_command(main))
