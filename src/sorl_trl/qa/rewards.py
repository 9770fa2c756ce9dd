"""Reward functions for TRL's trainers, which call them by keyword with one entry per trajectory.

Each needs the columns `trajectory` (from the rollout) and, but for `format_reward`, `golden_answers` (from the
training set), and ignores the rest. A trajectory that ended by an infrastructure failure gets `None`, which TRL leaves
out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from sorl_trl.qa.scoring import score_exact_match, score_f1, score_format, score_search_hits
from sorl_trl.types import Trajectory

Score = TypeVar("Score")


def exact_match_reward(
    *, trajectory: Sequence[Trajectory], golden_answers: Sequence[Sequence[str]], **_: object
) -> list[float | None]:
    """1.0 for an answer that matches a golden answer exactly after normalization, else 0.0."""
    return _score_each(score_exact_match, trajectory, golden_answers)


def f1_reward(
    *, trajectory: Sequence[Trajectory], golden_answers: Sequence[Sequence[str]], **_: object
) -> list[float | None]:
    """Token F1 of the answer with the best of the golden answers, in [0, 1]."""
    return _score_each(score_f1, trajectory, golden_answers)


def format_reward(*, trajectory: Sequence[Trajectory], **_: object) -> list[float | None]:
    """1.0 for a trajectory with an answer and without an invalid action, else 0.0."""
    return _score_each(score_format, trajectory)


def search_hit_turn_reward(
    *, trajectory: Sequence[Trajectory], golden_answers: Sequence[Sequence[str]], **_: object
) -> list[list[float] | None]:
    """Turn rewards, one per turn: 1.0 for the first search that brought in a golden answer, else 0.0."""
    return _score_each(score_search_hits, trajectory, golden_answers)


def _score_each(
    score: Callable[..., Score], trajectories: Sequence[Trajectory], *columns: Sequence[object]
) -> list[Score | None]:
    return [
        None if trajectory.stop_reason.is_infrastructure_failure else score(trajectory, *row)
        for trajectory, *row in zip(trajectories, *columns, strict=True)
    ]
