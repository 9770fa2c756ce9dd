"""From outcomes to the figures of a dataset and of a family of datasets: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sorl_trl.evaluation.bootstrap import Estimate, Floats, average, bootstrap
from sorl_trl.evaluation.run_folder import Outcome
from sorl_trl.records.evaluated import MEASURES, SCORES
from sorl_trl.types import StopReason


@dataclass(frozen=True)
class DatasetSummary:
    """The figures of one dataset. Means and intervals are over questions."""

    name: str
    family: str
    questions: int
    trajectories: int
    masked: int
    """Trajectories that an infrastructure failure ended: they enter no mean."""
    unscored_questions: int
    """The questions of which every trajectory is masked."""
    means: Mapping[str, Estimate]
    """Measure -> mean over questions of the mean over a question's trajectories."""
    best_of_n: Mapping[str, Estimate]
    """Score -> mean over questions of the best of a question's trajectories; `correct` is pass@n. Empty for n = 1."""
    stop_reasons: Mapping[str, float]
    """Shares of all trajectories."""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "means": _estimates(self.means), "best_of_n": _estimates(self.best_of_n)}


@dataclass(frozen=True)
class FamilySummary:
    """Macro averages over the datasets of a family that have the measure, each with the same weight."""

    family: str
    datasets: tuple[str, ...]
    means: Mapping[str, Estimate]
    best_of_n: Mapping[str, Estimate]

    def to_json(self) -> dict[str, Any]:
        return {
            "datasets": list(self.datasets),
            "means": _estimates(self.means),
            "best_of_n": _estimates(self.best_of_n),
        }


def summarize(name: str, family: str, outcomes: Sequence[Outcome]) -> DatasetSummary:
    """Summarize a dataset, which has at least one outcome."""
    questions = by_question(outcomes)
    is_sampled = len(outcomes) > len(questions)
    reasons = Counter(outcome.stop_reason for outcome in outcomes)
    return DatasetSummary(
        name=name,
        family=family,
        questions=len(questions),
        trajectories=len(outcomes),
        masked=sum(outcome.is_masked for outcome in outcomes),
        unscored_questions=sum(all(each.is_masked for each in asked) for asked in questions.values()),
        means=bootstrap(question_columns(questions, MEASURES), name),
        best_of_n=bootstrap(question_columns(questions, SCORES, max), name) if is_sampled else {},
        stop_reasons={reason.value: reasons[reason] / len(outcomes) for reason in StopReason},
    )


def summarize_families(summaries: Sequence[DatasetSummary]) -> list[FamilySummary]:
    """Make one summary per family, in the order of first appearance."""
    families = dict.fromkeys(summary.family for summary in summaries)
    members = {family: [summary for summary in summaries if summary.family == family] for family in families}
    return [
        FamilySummary(
            family,
            tuple(summary.name for summary in group),
            macro_average([summary.means for summary in group]),
            macro_average([summary.best_of_n for summary in group]),
        )
        for family, group in members.items()
    ]


def macro_average(groups: Sequence[Mapping[str, Estimate]]) -> dict[str, Estimate]:
    """Per measure the average over the groups that have it."""
    names = dict.fromkeys(name for group in groups for name in group)
    return {name: average([group[name] for group in groups if name in group]) for name in names}


def by_question(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """The outcomes of each question, in the order of first appearance."""
    questions: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        questions.setdefault(outcome.key, []).append(outcome)
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
    values = [value for outcome in outcomes if (value := outcome.measures[name]) is not None]
    return combine(values) if values else float("nan")


def _estimates(estimates: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
    return {
        name: {"mean": estimate.mean, "low": estimate.interval[0], "high": estimate.interval[1]}
        for name, estimate in estimates.items()
    }
