"""Questions whose turns hold working: copied facts, comparisons and counts from which each action follows.

`WorkingWorld(verbosity, hops)` has the same questions, passages and decisions at every verbosity, and turns of about
so many tokens. That turns of some length do better than others is then owed to their length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from benchmarks.worlds.clerk import Clerk, WorkingNoise, words
from benchmarks.worlds.dated import build_dated
from benchmarks.worlds.questions import EVALUATION_QUESTIONS, PRACTICE_WORLDS, TRAIN_QUESTIONS, SearchWorld
from sorl_trl.rollout import EngineOptions, Generator, RolloutLimits
from sorl_trl.sandbox import PolicyConfig, WarmStartConfig, World, WorldSize, warm_start

POLICY = PolicyConfig(96, 2, 4)
"""0.28 M parameters: two wide layers take less time than four narrow ones."""


@dataclass(frozen=True)
class WorkingWarmStart(WarmStartConfig):
    """As the sandbox's, with a clerk for its expert."""

    noise: WorkingNoise = field(default_factory=WorkingNoise)
    verbosity: int = 40

    def expert(self, tokenizer: PreTrainedTokenizerBase, world: World) -> Generator:
        prompts = self.prompts(tokenizer, world.train)
        return Clerk(self.verbosity, tokenizer, world.relations, prompts, self.noise, self.seed)

    def texts(self) -> Iterable[str]:
        return words()


@dataclass(frozen=True)
class WorkingWorld(SearchWorld):
    """A dated world to train in, another to be judged in, and a policy that practised in eight more.

    Args:
        title: in the report.
        description: in the report.
        verbosity: about how many tokens a turn has, one of `VERBOSITIES`.
        hops: facts to be looked up; a trajectory has one turn more.
        policy: its size.
        practice: trajectories to imitate and steps of imitation, in this order. 800 steps of one seed each gave a
            greedy EM of .84 in turns of 4 tokens, and of 1.0 in turns of 10 and 40, of three hops. In turns of 80, 500
            steps (95 CPU seconds) taught every decision; turns of 20 and other hops have not been tried.
        noise: the expert's mistakes with three hops; with others, rarer or more frequent ones (`spread`).
        seeds_per_policy: how many seeds, counted from 1, share a policy: 1 to 4 share one if it is 4.
        evaluation_questions: how many judge.
    """

    title: str
    description: str
    verbosity: int = 40
    hops: int = 3
    policy: PolicyConfig = POLICY
    practice: tuple[int, int] = (6000, 800)
    noise: WorkingNoise = field(default_factory=WorkingNoise)
    seeds_per_policy: int = 1
    evaluation_questions: int = EVALUATION_QUESTIONS

    engine = EngineOptions(rejoin_after=0)  # searches take no time

    @property
    def limits(self) -> RolloutLimits:  # type: ignore[override]
        """One spare search, and room for turns that ramble."""
        return RolloutLimits(
            max_turns=self.hops + 1,
            max_turn_tokens=16 + self.verbosity * self.hops // 2,
            max_observation_tokens=24,
            max_trajectory_tokens=(self.hops + 2) * (16 + self.verbosity * 11 // 10),
            top_k=1,
        )

    @property
    def warm_start(self) -> WorkingWarmStart:
        trajectories, steps = self.practice
        return WorkingWarmStart(
            policy=self.policy,
            noise=self.noise.spread(self.hops),
            limits=self.limits,
            trajectories=trajectories,
            steps=steps,
            # A step reads about as many tokens whatever their turns are; short ones say little of each decision.
            batch_size=min(32, max(8, 320 // self.verbosity)),
            verbosity=self.verbosity,
        )

    @property
    def name(self) -> str:
        policy = f"{self.policy.hidden_size}x{self.policy.layers}"
        shared = f"-for-{self.seeds_per_policy}" if self.seeds_per_policy > 1 else ""
        judged = f"-by-{self.evaluation_questions}" if self.evaluation_questions != EVALUATION_QUESTIONS else ""
        return f"working-{self.verbosity}-tokens-{self.hops}-hops-{policy}{shared}{judged}"

    @property
    def settings(self) -> tuple[object, ...]:
        return self.hops, self.limits, self.warm_start, self.seeds_per_policy, self.evaluation_questions

    def build(self, seed: int, target: Path, cache: Path) -> Path:
        size = WorldSize(TRAIN_QUESTIONS, self.evaluation_questions)
        parts = {name: build_dated(1000 * seed + i, self.hops, size) for i, name in enumerate(("train", "unseen"))}
        self.write(parts, target)
        number = (seed - 1) // self.seeds_per_policy
        # Far from the seeds of the worlds above, whatever seeds share the policy.
        practice = [build_dated(-1000 * number - i - 1, self.hops, size) for i in range(PRACTICE_WORLDS)]
        return warm_start(practice[0], practice, cache, replace(self.warm_start, seed=number))
