"""Questions whose turns hold working: copied facts, comparisons and counts from which each action follows.

`WorkingWorld` has the same questions, passages and decisions at every verbosity, and turns of about
so many tokens. That turns of some length do better than others is then owed to their length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from examples.quickstart import PolicyConfig, WarmStartConfig, WorldSize, warm_start

from benchmarks.worlds.clerk import Clerk, WorkingNoise, words
from benchmarks.worlds.dated import HOPS, build_dated
from benchmarks.worlds.questions import EVALUATION_QUESTIONS, PRACTICE_WORLDS, TRAIN_QUESTIONS, SearchWorld
from sorl_trl.rollout import EngineOptions, RolloutLimits

POLICY = PolicyConfig(96, 2, 4)
"""0.28 M parameters: two wide layers take less time than four narrow ones."""
TRAJECTORIES, STEPS = 6000, 800
"""To imitate, and of imitation. 800 steps of one seed each gave a greedy EM of .84 in turns of 4 tokens, and of 1.0 in
turns of 10 and 40. In turns of 80, 500 steps (95 CPU seconds) taught every decision."""


@dataclass(frozen=True)
class WorkingWorld(SearchWorld):
    """A dated world to train in, another to be judged in, and a policy that practised in eight more.

    Args:
        title: in the report.
        description: in the report.
        verbosity: about how many tokens a turn has, one of `VERBOSITIES`.
        seeds_per_policy: how many seeds, counted from 1, share a policy: 1 to 4 share one if it is 4.
        evaluation_questions: how many judge.
    """

    title: str
    description: str
    verbosity: int = 40
    seeds_per_policy: int = 1
    evaluation_questions: int = EVALUATION_QUESTIONS

    engine = EngineOptions(rejoin_after=0)  # searches take no time

    @property
    def limits(self) -> RolloutLimits:  # type: ignore[override]
        """One spare search, and room for turns that ramble."""
        return RolloutLimits(
            max_turns=HOPS + 1,
            max_turn_tokens=16 + self.verbosity * HOPS // 2,
            max_observation_tokens=24,
            max_trajectory_tokens=(HOPS + 2) * (16 + self.verbosity * 11 // 10),
            top_k=1,
        )

    @property
    def warm_start(self) -> WarmStartConfig:
        return WarmStartConfig(
            policy=POLICY,
            expert=partial(Clerk, self.verbosity),
            noise=WorkingNoise(),
            words=" ".join(words()),
            limits=self.limits,
            trajectories=TRAJECTORIES,
            steps=STEPS,
            # A step reads about as many tokens whatever their turns are; short ones say little of each decision.
            batch_size=min(32, max(8, 320 // self.verbosity)),
        )

    @property
    def name(self) -> str:
        policy = f"{POLICY.hidden_size}x{POLICY.layers}"
        shared = f"-for-{self.seeds_per_policy}" if self.seeds_per_policy > 1 else ""
        judged = f"-by-{self.evaluation_questions}" if self.evaluation_questions != EVALUATION_QUESTIONS else ""
        return f"working-{self.verbosity}-tokens-{HOPS}-hops-{policy}{shared}{judged}"

    @property
    def settings(self) -> tuple[object, ...]:
        return HOPS, self.limits, self.warm_start, self.seeds_per_policy, self.evaluation_questions

    def build(self, seed: int, target: Path, cache: Path) -> Path:
        size = WorldSize(TRAIN_QUESTIONS, self.evaluation_questions)
        parts = {name: build_dated(1000 * seed + i, size) for i, name in enumerate(("train", "unseen"))}
        self.write(parts, target)
        number = (seed - 1) // self.seeds_per_policy
        # Far from the seeds of the worlds above, whatever seeds share the policy.
        practice = [build_dated(-1000 * number - i - 1, size) for i in range(PRACTICE_WORLDS)]
        return warm_start(practice[0], practice, cache, replace(self.warm_start, seed=number))
