"""Worlds of the stability benchmark: what any of them must know, and questions about an invented world."""

from __future__ import annotations

import shutil
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from examples.quickstart import (
    CORPUS_FILE,
    EVALUATION_FILE,
    LIMITS,
    PROMPT_TEMPLATE,
    PROTOCOL,
    TRAIN_FILE,
    WarmStartConfig,
    World,
    WorldSize,
    warm_start,
)
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.worlds.invented import build_invented
from sorl_trl import SearchRollout, qa
from sorl_trl.rollout import Collector, EngineOptions, RolloutLimits, TurnEnd, model_engine
from sorl_trl.search import BM25Index

POLICY = "policy"
Score = Callable[[PreTrainedModel, GenerationConfig], float]
"""The share that a policy in evaluation mode solves of tasks that nobody trained on, always the same ones."""


class BenchmarkWorld(ABC):
    """Tasks to train on, others to be judged by, and a policy that has just learnt to act.

    A seed decides the tasks, the policy's first weights and what it imitated; where several seeds share a policy, it
    decides the tasks alone. Everything else is the same for all seeds, and recorded in `settings`.
    """

    title: str
    description: str

    @property
    @abstractmethod
    def max_completion_length(self) -> int:
        """Tokens of a trajectory, the prompt aside."""

    @property
    @abstractmethod
    def most_turns(self) -> int:
        """That a trajectory can have."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Of its folder; worlds with different data or policies have different ones."""

    @property
    @abstractmethod
    def settings(self) -> tuple[object, ...]:
        """All that decides a run in it, besides the code; the `repr` of each shows its whole content."""

    @abstractmethod
    def build(self, seed: int, target: Path, cache: Path) -> Path:
        """Write the data into `target`, and return the folder of the policy, which may be in `cache`."""

    @abstractmethod
    def trainer_arguments(self, folder: Path) -> dict[str, Any]:
        """What a trainer is given besides model, tokenizer and config: data, rewards, and how it acts.

        Args:
            folder: as `prepare` returned it.
        """

    @abstractmethod
    def examination(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Score:
        """The tasks that judge; their data is read once per run."""

    def prepare(self, seed: int, folder: Path) -> Path:
        """Make the data and the policy of a seed in `folder`, once; the policy is in its subfolder `policy`."""
        target = folder / f"{self.name}-{seed}"
        if not (target / POLICY).is_dir():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            policy = self.build(seed, target, folder / "cache")
            shutil.copytree(policy, target / "part")
            (target / "part").rename(target / POLICY)
        return target


PRACTICE_WORLDS = 8
TRAIN_QUESTIONS = 1000
EVALUATION_QUESTIONS = 200


class SearchWorld(BenchmarkWorld):
    """Questions to be answered with a search engine: a closed world to train in, and an unseen one that judges."""

    limits: RolloutLimits
    engine: EngineOptions = EngineOptions()

    @property
    def max_completion_length(self) -> int:
        return self.limits.max_trajectory_tokens

    @property
    def most_turns(self) -> int:
        return self.limits.max_turns + 1  # and the answer, once no search is left

    def write(self, parts: Mapping[str, World], target: Path) -> None:
        """Write the worlds "train" and "unseen", each with its index."""
        for name, part in parts.items():
            part.write(target / name)
            BM25Index.build(target / name / CORPUS_FILE, target / name / "index", show_progress=False)

    def trainer_arguments(self, folder: Path) -> dict[str, Any]:
        questions = qa.load_questions(folder / "train" / TRAIN_FILE)
        index = BM25Index.load(folder / "train" / "index")
        return {
            "reward_funcs": qa.exact_match_reward,
            "train_dataset": Dataset.from_list(qa.build_prompt_rows(questions, PROMPT_TEMPLATE)),
            "rollout_func": SearchRollout(index, PROTOCOL, self.limits, engine=self.engine),
        }

    def examination(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Score:
        questions = qa.load_questions(folder / "unseen" / EVALUATION_FILE)
        questions = sorted(questions, key=lambda question: int(question.id.rpartition("-")[2]))
        prompts = [tokenizer.encode(row["prompt"]) for row in qa.build_prompt_rows(questions, PROMPT_TEMPLATE)]
        index = BM25Index.load(folder / "unseen" / "index")
        collector = Collector(tokenizer, index, PROTOCOL, self.limits, rejoin_after=self.engine.rejoin_after)
        end = TurnEnd(tokenizer, PROTOCOL.stop_strings, [tokenizer.eos_token_id])

        def score(model: PreTrainedModel, config: GenerationConfig) -> float:
            trajectories = collector.collect(prompts, model_engine(model, end, config))
            pairs = zip(trajectories, questions, strict=True)
            return statistics.fmean(qa.exact_match(each.answer, asked.golden_answers) for each, asked in pairs)

        return score


@dataclass(frozen=True)
class QuestionWorld(SearchWorld):
    """One world to train in, another to be judged in, and a policy that practised in eight more."""

    title: str
    description: str
    hop_shares: tuple[float, ...] = (0.5, 0.5)
    limits: RolloutLimits = LIMITS
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)

    @property
    def name(self) -> str:
        return "world-" + "-".join(f"{share:g}" for share in self.hop_shares)

    @property
    def settings(self) -> tuple[object, ...]:
        return self.hop_shares, self.limits, self.warm_start

    def build(self, seed: int, target: Path, cache: Path) -> Path:
        size = WorldSize(TRAIN_QUESTIONS, EVALUATION_QUESTIONS, self.hop_shares)
        world, unseen, *practice = (build_invented(1000 * seed + i, size=size) for i in range(2 + PRACTICE_WORLDS))
        self.write({"train": world, "unseen": unseen}, target)
        return warm_start(world, practice, cache, self.warm_start)
