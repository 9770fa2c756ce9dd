"""Candidates for turns or whole trajectories, of which the best goes on: TSR, arXiv 2602.11767, second-hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from sorl_trl.checks import COUNT, POSITIVE_COUNT, check_fields
from sorl_trl.rollout.environment import Reply, Responder
from sorl_trl.types import StopReason, Trajectory, Turn

if TYPE_CHECKING:
    from sorl_trl.rollout.collector import _Row


@dataclass(frozen=True)
class BestOfTurns:
    """Sample several candidates for each turn, let a copy of the environment answer each, and go on from the best.

    A trajectory grows as paths, whose scores are sums over their turns. After each turn, the best paths are kept, and
    in the end the best one is the trajectory; of equal ones, the first. Where an environment is down, a path is last.

    Args:
        candidates: How many turns to sample after each path.
        score: Gives a finite number to a row of the dataset, a turn, and the environment's reply. That is None if it
            was not asked, because the turn answers, is invalid or is the last.
        width: How many paths to keep. One is a greedy choice, more are a beam.
        depth: How many turns to sample after each candidate, only to add their scores to its own as it is compared.

    Raises ValueError if a number is out of range.
    """

    candidates: Annotated[int, POSITIVE_COUNT]
    score: Callable[[Mapping[str, Any], Turn, Reply | None], float]
    width: Annotated[int, POSITIVE_COUNT] = 1
    depth: Annotated[int, COUNT] = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class BestOfTrajectories:
    """Sample `n` trajectories in place of each, and keep the one with the highest score; of equal ones, the first.

    `score` gives a finite number to a row of the dataset and a trajectory. Those that an infrastructure failure ended
    come last. Raises ValueError if `n` is below 1.
    """

    n: Annotated[int, POSITIVE_COUNT]
    score: Callable[[Mapping[str, Any], Trajectory], float]

    def __post_init__(self) -> None:
        check_fields(self)

    def best(self, examples: Sequence[Mapping[str, Any]], trajectories: Sequence[Trajectory]) -> list[int]:
        """The index of the best of each `n` trajectories. Raises ValueError for a score that is not finite."""
        given = zip(examples, trajectories, strict=True)
        scores = [_score(each.stop_reason, self.score, example, each) for example, each in given]
        return [max(range(i, i + self.n), key=scores.__getitem__) for i in range(0, len(scores), self.n)]


@dataclass(eq=False)
class _Path:
    row: _Row
    score: float = 0.0
    """The sum over its turns."""
    rank: float = 0.0
    """That, and the scores of the turns that look ahead from here."""
    left: int = 0
    """How many turns are still to look ahead."""
    candidate: _Path | None = None
    """From where it looks ahead, if it does."""


class Paths:
    """The paths of one trajectory, which begin with `row`. Further rows have its number plus a multiple of `rows`."""

    def __init__(
        self, how: BestOfTurns, row: _Row, rows: int, example: Mapping[str, Any], responder: Responder
    ) -> None:
        self._how, self._example, self._responder = how, example, responder
        most = 2 * how.width * how.candidates  # all candidates, and what looks ahead from each
        self._free = [row.index + rows * i for i in reversed(range(1, most))]
        self.first = self._grow([_Path(row)])
        """The rows whose first turn begins."""

    def after(self, row: _Row, reply: Reply | None) -> tuple[list[_Row], list[_Row]]:
        """After a turn of `row`, the rows whose next turn begins, and those that are given up."""
        path = self._growing.pop(row.index)
        path.score += _score(row.stop_reason, self._how.score, self._example, row.last_turn, reply)
        path.rank = path.score
        if path.candidate is not None:
            path.candidate.rank, path.left = path.score, path.left - 1
        if path.left and row.stop_reason is None:
            if path.candidate is None:  # what looks ahead takes the row, whose context the engine has read
                path.row, path = self._copy(row), _Path(row, path.score, left=path.left, candidate=path)
            self._growing[row.index] = path
            return [row], []
        given_up, kept = [row] if path.candidate else [], list[_Path]()
        if not self._growing:
            ranked = sorted(self.paths, key=lambda each: -each.rank)
            kept, lost = ranked[: self._how.width], ranked[self._how.width :]
            given_up += [each.row for each in lost]
        self._free += [each.index for each in given_up]
        return self._grow(kept) if kept else [], given_up

    def _grow(self, kept: Sequence[_Path]) -> list[_Row]:
        """Begin the candidates for the next turn of each path that has not ended, the first of them in its row."""
        self.paths: list[_Path] = []
        """All candidates and all paths that have ended, the best first if no other is left."""
        for path in kept:
            copies = [self._copy(path.row) for _ in range(self._how.candidates - 1) if path.row.stop_reason is None]
            self.paths += [_Path(row, path.score, path.score, self._how.depth) for row in (path.row, *copies)]
        self._growing = {each.row.index: each for each in self.paths if each.row.stop_reason is None}
        return [each.row for each in self._growing.values()]

    def _copy(self, row: _Row) -> _Row:
        index = self._free.pop()
        self._responder.branch(row.index, index)
        return replace(row, index=index, segments=[*row.segments])


def _score(stop_reason: StopReason | None, function: Callable[..., float], *scored: Any) -> float:
    if stop_reason is not None and stop_reason.is_infrastructure_failure:
        return -math.inf
    if not math.isfinite(score := function(*scored)):
        raise ValueError(f"`score` returned {score!r}, but must return a finite number")
    return float(score)
