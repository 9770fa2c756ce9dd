"""From outcomes to the figures of a dataset: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sorl_trl.evaluation.bootstrap import Estimate, Floats, bootstrap
from sorl_trl.evaluation.run_folder import Outcome, is_masked
from sorl_trl.records.evaluated import MEASURES, SCORES
from sorl_trl.types import StopReason


@dataclass(frozen=True)
class DatasetSummary:
    """The figures of one dataset. Means and intervals are over questions."""

    name: str
    questions: int
    trajectories: int
    masked: int
    """Trajectories that an infrastructure failure ended: they enter no mean."""
    means: Mapping[str, Estimate]
    """Measure -> mean over questions of the mean over a question's trajectories."""
    best_of_n: Mapping[str, Estimate]
    """Score -> mean over questions of the best of a question's trajectories; `correct` is pass@n. Empty for n = 1."""
    stop_reasons: Mapping[str, float]
    """Shares of all trajectories."""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "means": _estimates(self.means), "best_of_n": _estimates(self.best_of_n)}


def summarize(name: str, outcomes: Sequence[Outcome]) -> DatasetSummary:
    """Summarize a dataset, which has at least one outcome."""
    questions = by_question(outcomes)
    is_sampled = len(outcomes) > len(questions)
    reasons = Counter(outcome["stop_reason"] for outcome in outcomes)
    return DatasetSummary(
        name=name,
        questions=len(questions),
        trajectories=len(outcomes),
        masked=sum(map(is_masked, outcomes)),
        means=bootstrap(question_columns(questions, MEASURES), name),
        best_of_n=bootstrap(question_columns(questions, SCORES, max), name) if is_sampled else {},
        stop_reasons={reason.value: reasons[reason.value] / len(outcomes) for reason in StopReason},
    )


def by_question(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """The outcomes of each question, in the order of first appearance, by its id and text: ids may be row numbers."""
    questions: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        questions.setdefault((outcome["question_id"], outcome["question"]), []).append(outcome)
    return questions


def question_columns(
    questions: Mapping[tuple[str, str], Sequence[Outcome]],
    measures: Sequence[str],
    combine: Callable[[list[float]], float] = lambda values: sum(values) / len(values),
) -> dict[str, Floats]:
    """Measure -> one value per question, shape (questions,): its trajectories' values combined, NaN without any."""
    return {
        name: np.array([_combined(name, outcomes, combine) for outcomes in questions.values()]) for name in measures
    }


def _combined(name: str, outcomes: Sequence[Outcome], combine: Callable[[list[float]], float]) -> float:
    values = [value for outcome in outcomes if (value := outcome[name]) is not None]
    return combine(values) if values else float("nan")


def _estimates(estimates: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
    return {
        name: {"mean": estimate.mean, "low": estimate.interval[0], "high": estimate.interval[1]}
        for name, estimate in estimates.items()
    }
