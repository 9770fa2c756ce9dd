"""Trajectories and generators written by hand."""

from __future__ import annotations

from collections.abc import Mapping

from sorl_trl.evaluation.run import measure
from sorl_trl.qa import Question
from sorl_trl.records.evaluated import MEASURES, EvaluatedTrajectory, Outcome
from sorl_trl.types import Action, ActionKind, Observation, Passage, StopReason, Trajectory, Turn


def question(gold: str, hops: int | None = None) -> Question:
    return Question("q", "who ?", (gold,), {} if hops is None else {"hops": hops})


def answered(answer: str, searches: int = 0) -> Trajectory:
    """`searches` searches that find a passage each, then an answer."""
    search = Turn((1,), "", Action(ActionKind.SEARCH, "query"))
    observation = Observation((2,), "", (Passage("p", "", ""),))
    final = Turn((3,), "", Action(ActionKind.ANSWER, answer))
    return Trajectory((0,), (search, observation) * searches + (final,), StopReason.ANSWERED)


def ended(reason: StopReason) -> Trajectory:
    return Trajectory((0,), (Turn((1,), "", Action(ActionKind.SEARCH, "query")),), reason)


def evaluated(asked: Question, given: Trajectory, sample: int = 0, dataset: str = "nq") -> EvaluatedTrajectory:
    return EvaluatedTrajectory(dataset, asked, sample, "who ?", given, measure(asked, given))


def outcome(question_id: str, exact_match: float | None = None, sample: int = 0, **measures: float) -> Outcome:
    """An outcome with a score that is also `correct`, or a masked one; what is not named is 0, or choice's `None`."""
    known: Mapping[str, float | None] = dict.fromkeys(MEASURES)
    if exact_match is not None:
        known = dict.fromkeys(MEASURES, 0.0) | {"choice_accuracy": None}
        known |= {"exact_match": exact_match, "correct": exact_match} | measures
    reason = StopReason.SEARCH_UNAVAILABLE if exact_match is None else StopReason.ANSWERED
    about = {"question_id": question_id, "question": f"who is {question_id} ?", "stop_reason": reason.value}
    return {**about, "sample": sample, **known, "environment": {}}
