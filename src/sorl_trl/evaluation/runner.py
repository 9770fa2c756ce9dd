"""Runs a policy over questions in memory and scores what it answers, with the scorer that rewards use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from sorl_trl.qa import Question, score_exact_match, score_f1
from sorl_trl.rollout import Collector, Generator, rollout_statistics
from sorl_trl.types import Trajectory


@dataclass(frozen=True)
class EvaluationResult:
    """One trajectory per question, in order.

    A trajectory that an infrastructure failure ended says nothing about the policy: it enters no mean but its own
    share, `rollout_statistics`' `masked_share`.
    """

    questions: tuple[Question, ...]
    trajectories: tuple[Trajectory, ...]

    @cached_property
    def scored(self) -> list[tuple[Question, Trajectory]]:
        """The pairs that enter the scores."""
        pairs = zip(self.questions, self.trajectories, strict=True)
        return [(asked, given) for asked, given in pairs if not given.stop_reason.is_infrastructure_failure]

    def exact_match(self, hops: int | None = None) -> float | None:
        """Mean exact match in [0, 1], over the questions of so many hops if given; None where there is none."""
        return self._mean(score_exact_match, hops)

    def f1(self, hops: int | None = None) -> float | None:
        """Mean token F1 in [0, 1], likewise."""
        return self._mean(score_f1, hops)

    def hops(self) -> list[int]:
        """The numbers of hops that occur among the scored questions, ascending; empty if no question says."""
        return sorted({q.metadata["hops"] for q, _ in self.scored if q.metadata.get("hops") is not None})

    def metrics(self) -> dict[str, float]:
        """Everything in one flat dictionary: scores, scores by hops, and the statistics of the trajectories."""
        scores = {"exact_match": self.exact_match(), "f1": self.f1()}
        for hops in self.hops():
            scores |= {f"exact_match/hops_{hops}": self.exact_match(hops), f"f1/hops_{hops}": self.f1(hops)}
        known = {name: score for name, score in scores.items() if score is not None}
        return {"questions": float(len(self.questions))} | known | rollout_statistics(self.trajectories)

    def _mean(self, score: Callable[[Trajectory, Sequence[str]], float], hops: int | None) -> float | None:
        scores = [
            score(given, asked.golden_answers)
            for asked, given in self.scored
            if hops is None or asked.metadata.get("hops") == hops
        ]
        return sum(scores) / len(scores) if scores else None


def encode_prompts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Token ids of `build_prompt_rows`' prompts: text as it is, messages by the chat template."""
    return [_encode_prompt(tokenizer, row["prompt"]) for row in rows]


def evaluate(
    collector: Collector,
    generator: Generator,
    questions: Sequence[Question],
    prompts: Sequence[Sequence[int]],
    batch_size: int = 128,
) -> EvaluationResult:
    """Collect one trajectory per question, `batch_size` at a time, with a progress bar.

    Args:
        collector: Its search engine decides what the policy can find; with `NoSearch`, nothing.
        generator: Decides between greedy and sampled.
        questions: What is asked.
        prompts: Token ids, one prompt per question: see `encode_prompts`.
        batch_size: Trajectories that advance together.

    Raises:
        ValueError: There are no questions, not as many prompts as questions, or `batch_size` is below 1.
    """
    if not questions or len(prompts) != len(questions):
        raise ValueError(f"{len(prompts)} prompts for {len(questions)} questions; both must be equal, at least 1")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    trajectories: list[Trajectory] = []
    with tqdm(total=len(prompts), desc="Evaluating", unit="question") as progress:
        for start in range(0, len(prompts), batch_size):
            batch = collector.collect(prompts[start : start + batch_size], generator)
            trajectories += batch
            progress.update(len(batch))
    return EvaluationResult(tuple(questions), tuple(trajectories))


def _encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]]) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False))
