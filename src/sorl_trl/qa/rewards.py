"""Reward functions for TRL's trainers, which call them by keyword with one entry per trajectory.

Each takes the columns that it names and ignores the rest: `trajectory` comes from the rollout, other columns from the
training set that `build_prompt_rows` makes. A trajectory that an infrastructure failure ended gets `None`, and TRL
leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from sorl_trl.qa import scoring
from sorl_trl.types import ActionKind, Trajectory, Turn

Score = TypeVar("Score")
Trajectories = Sequence[Trajectory]
Answers = Sequence[Sequence[str]]
OptionPairs = Sequence[tuple[str, str]]
"""Letter and text of each option; empty for an open question. A dataset turns the pairs into lists."""


def exact_match_reward(*, trajectory: Trajectories, golden_answers: Answers, **_: object) -> list[float | None]:
    """Give 1.0 for an answer that equals a golden answer after normalization, else 0.0."""
    return _score_each(lambda each, golden: scoring.exact_match(each.answer, golden), trajectory, golden_answers)


def sub_exact_match_reward(*, trajectory: Trajectories, golden_answers: Answers, **_: object) -> list[float | None]:
    """Give 1.0 for an answer that contains a golden answer as whole words, else 0.0. Long answers can exploit it."""
    return _score_each(lambda each, golden: scoring.sub_exact_match(each.answer, golden), trajectory, golden_answers)


def f1_reward(*, trajectory: Trajectories, golden_answers: Answers, **_: object) -> list[float | None]:
    """Give the best token F1 of the answer with a golden answer, in [0, 1]."""
    return _score_each(lambda each, golden: scoring.token_f1(each.answer, golden), trajectory, golden_answers)


def f1_plus_reward(*, trajectory: Trajectories, golden_answers: Answers, **_: object) -> list[float | None]:
    """Give `f1_reward`, less 0.1 without any search and 0.1 without an answer: F1+ of Search-R1++, as reported."""
    return _score_each(scoring.score_f1_plus, trajectory, golden_answers)


def choice_reward(
    *, trajectory: Trajectories, golden_answers: Answers, options: Sequence[OptionPairs | None], **_: object
) -> list[float | None]:
    """Give 1.0 for an answer that names the right option, by letter or text, else 0.0.

    Raises:
        ValueError: A question is open.
    """
    return _score_each(scoring.score_choice, trajectory, golden_answers, _mappings(options))


def answer_reward(
    *,
    trajectory: Trajectories,
    golden_answers: Answers,
    options: Sequence[OptionPairs | None] | None = None,
    **_: object,
) -> list[float | None]:
    """Give choice accuracy for questions with options and exact match for open ones, for mixed sets."""
    columns = [None] * len(trajectory) if options is None else options
    return _score_each(scoring.score_answer, trajectory, golden_answers, _mappings(columns))


def format_reward(*, trajectory: Trajectories, **_: object) -> list[float | None]:
    """Give 1.0 for a trajectory with an answer and without an invalid action, else 0.0."""
    return _score_each(lambda each: float(each.answer is not None and all(map(_is_valid, each.turns))), trajectory)


def turn_format_reward(*, trajectory: Trajectories, **_: object) -> list[list[float] | None]:
    """Give each turn 1.0 for a well-formed action, 0.0 for an invalid one.

    The sum grows with the number of turns, so give it a low weight, or the policy is paid for searching on.
    """
    return _score_each(lambda each: [float(_is_valid(turn)) for turn in each.turns], trajectory)


def search_hit_turn_reward(
    *, trajectory: Trajectories, golden_answers: Answers, **_: object
) -> list[list[float] | None]:
    """Give each turn 1.0 if it is the first search that found a golden answer, else 0.0."""
    return _score_each(scoring.score_search_hits, trajectory, golden_answers)


def environment_reward(*, trajectory: Trajectories, **_: object) -> list[list[float] | None]:
    """Give each turn its environment's reward (`Reply.reward`), or 0.0 if it gave none."""
    return _score_each(lambda each: [turn.reward or 0.0 for turn in each.turns], trajectory)


def solved_reward(*, trajectory: Trajectories, environments: Sequence[Any], **_: object) -> list[float | None]:
    """Give 1.0 if the environment's attribute `solved` is true, else 0.0."""
    return _score_each(lambda _, environment: float(environment.solved), trajectory, environments)


REWARDS: dict[str, Callable[..., list[Any]]] = {
    "answer": answer_reward,
    "exact_match": exact_match_reward,
    "sub_exact_match": sub_exact_match_reward,
    "f1": f1_reward,
    "f1_plus": f1_plus_reward,
    "choice": choice_reward,
    "format": format_reward,
    "turn_format": turn_format_reward,
    "search_hit": search_hit_turn_reward,
    "environment": environment_reward,
    "solved": solved_reward,
}
"""The reward functions by the names that recipes use."""
TASK_REWARDS = frozenset({"environment", "solved"})
"""The names of the rewards that an environment computes."""


def _score_each(
    score: Callable[..., Score], trajectories: Sequence[Trajectory], *columns: Iterable[object]
) -> list[Score | None]:
    return [
        None if trajectory.stop_reason.is_infrastructure_failure else score(trajectory, *row)
        for trajectory, *row in zip(trajectories, *columns, strict=True)
    ]


def _is_valid(turn: Turn) -> bool:
    return turn.action.kind is not ActionKind.INVALID


def _mappings(options: Sequence[OptionPairs | None]) -> list[dict[str, str]]:
    """Make mappings of pairs. `None` comes from joining datasets with and without the column."""
    return [dict(pairs or ()) for pairs in options]
