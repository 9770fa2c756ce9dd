"""Questions of one or more hops about an invented world, with a search engine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
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
from benchmarks.worlds.world import BenchmarkWorld, Examination
from sorl_trl import SearchRollout, qa
from sorl_trl.rollout import Collector, EngineOptions, RolloutLimits, TurnEnd, model_engine
from sorl_trl.search import BM25Index

PRACTICE_WORLDS = 8
TRAIN_QUESTIONS = 1000
EVALUATION_QUESTIONS = 200


class SearchWorld(BenchmarkWorld):
    """Questions to be answered with a search engine: a closed world to train in, and an unseen one that judges."""

    limits: RolloutLimits
    engine: EngineOptions = EngineOptions()

    @property
    def max_completion_length(self) -> int:  # type: ignore[override]
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

    def examination(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Examination:
        return _Questions(folder / "unseen", tokenizer, self.limits, self.engine)


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


class _Questions(Examination):
    def __init__(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, limits: RolloutLimits, engine: EngineOptions
    ) -> None:
        self._tokenizer = tokenizer
        questions = qa.load_questions(folder / EVALUATION_FILE)
        self._questions = sorted(questions, key=lambda question: int(question.id.rpartition("-")[2]))
        self._prompts = qa.encode_prompts(tokenizer, qa.build_prompt_rows(self._questions, PROMPT_TEMPLATE))
        index = BM25Index.load(folder / "index")
        self._collector = Collector(tokenizer, index, PROTOCOL, limits, rejoin_after=engine.rejoin_after)

    def score(self, model: PreTrainedModel, config: GenerationConfig) -> float:
        end = TurnEnd(self._tokenizer, PROTOCOL.stop_strings, [self._tokenizer.eos_token_id])
        trajectories = self._collector.collect(self._prompts, model_engine(model, end, config))
        return statistics.fmean(
            qa.exact_match(t.answer, q.golden_answers) for t, q in zip(trajectories, self._questions, strict=True)
        )
