"""Trajectories written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sorl_trl.evaluation.run import measure
from sorl_trl.qa import Question
from sorl_trl.records.evaluated import MEASURES, Outcome, row_of
from sorl_trl.types import Action, ActionKind, Observation, Passage, StopReason, ToolResult, Trajectory, Turn


def _said(agent: str, context: int, *ids: int) -> Turn:
    """Token 7 has the log-probability -0.7."""
    text = " ".join(map(str, ids))
    return Turn(ids, text, Action(ActionKind.MESSAGE, text), tuple(-i / 10 for i in ids), agent=agent, context=context)


def _read(role: str, context: int, *ids: int, repeats: bool = False) -> Observation:
    results = (ToolResult("find", "14"),) if role == "tool" else ()
    text = " ".join(map(str, ids))
    return Observation(ids, text, role=role, results=results, context=context, repeats=repeats)


TWO_AGENTS = Trajectory(
    (2, 3),
    (
        _said("planner", 0, 5, 6),
        _read("user", 1, 4, repeats=True),
        _read("user", 1, 7, 8),
        _said("searcher", 1, 9),
        _read("user", 2, 4, repeats=True),
        _said("searcher", 2, 10, 11),
        _read("tool", 1, 14),
        _said("searcher", 1, 12),
        _read("user", 0, 15, 16),
        _said("planner", 0, 13),
    ),
    StopReason.ENVIRONMENT_DONE,
)
"""A planner asks a searcher twice at a time. All that the second search reads was shown before; the first one calls a
tool, which answers later. Both begin with token 4."""


def question(gold: str) -> Question:
    return Question("q", "who ?", (gold,))


def answered(answer: str, searches: int = 0) -> Trajectory:
    """`searches` searches that find a passage each, then an answer."""
    search = Turn((1,), "", Action(ActionKind.SEARCH, "query"))
    observation = Observation((2,), "", (Passage("p", "", ""),))
    final = Turn((3,), "", Action(ActionKind.ANSWER, answer))
    return Trajectory((0,), (search, observation) * searches + (final,), StopReason.ANSWERED)


def ended(reason: StopReason) -> Trajectory:
    return Trajectory((0,), (Turn((1,), "", Action(ActionKind.SEARCH, "query")),), reason)


def evaluated(asked: Question, given: Trajectory, sample: int = 0, dataset: str = "nq") -> dict[str, Any]:
    about = {"dataset": dataset, "sample": sample, "prompt": "who ?", "environment": None}
    return {**about, **row_of(asked, given), **measure(asked, given)}


def outcome(question_id: str, exact_match: float | None = None, sample: int = 0, **measures: float) -> Outcome:
    """An outcome with a score that is also `correct`, or a masked one; what is not named is 0, or choice's `None`."""
    known: Mapping[str, float | None] = dict.fromkeys(MEASURES)
    if exact_match is not None:
        known = dict.fromkeys(MEASURES, 0.0) | {"choice_accuracy": None}
        known |= {"exact_match": exact_match, "correct": exact_match} | measures
    reason = StopReason.SEARCH_UNAVAILABLE if exact_match is None else StopReason.ANSWERED
    about = {"question_id": question_id, "question": f"who is {question_id} ?", "stop_reason": reason.value}
    return {**about, "sample": sample, **known, "environment": {}}
