"""Candidates for turns or whole trajectories, of which the best goes on: TSR, arXiv 2602.11767, second-hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from sorl_trl.checks import COUNT, POSITIVE_COUNT, check_fields
from sorl_trl.rollout.environment import Reply, Responder
from sorl_trl.types import Trajectory, Turn

if TYPE_CHECKING:
    from sorl_trl.rollout.collector import _Row


@dataclass(frozen=True)
class BestOfTurns:
    """Sample several candidates for each turn, let a copy of the environment answer each, and go on from the best.

    The score of a path is the sum over its turns. Of equal paths, the first is taken; one whose environment is down
    comes last. Raises ValueError if a number is out of range.

    Args:
        candidates: How many turns to sample after each path.
        score: Gives a finite number to a row of the dataset, a turn and the environment's reply, None if it has none.
        width: How many paths to keep: one is a greedy choice, more are a beam. The best one becomes the trajectory.
        depth: How many turns to sample after each candidate, only to add their scores to its own as it is compared.
    """

    candidates: Annotated[int, POSITIVE_COUNT]
    score: Callable[[Mapping[str, Any], Turn, Reply | None], float]
    width: Annotated[int, POSITIVE_COUNT] = 1
    depth: Annotated[int, COUNT] = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class BestOfTrajectories:
    """Sample several trajectories from copies of one environment, and keep the best, as `BestOfTurns` ranks paths.

    `score` gives a finite number to a row of the dataset and a trajectory.
    """

    candidates: Annotated[int, POSITIVE_COUNT]
    score: Callable[[Mapping[str, Any], Trajectory], float]
    width: ClassVar[int] = 1
    depth: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_fields(self)


Candidates: TypeAlias = BestOfTurns | BestOfTrajectories


@dataclass(eq=False)
class _Path:
    row: _Row
    score: float = 0.0  # the sum over its turns, or if only one path is kept, of the last turn
    rank: float = 0.0  # that, and the scores of the turns that look ahead from here
    left: int = 0  # how many turns are still to look ahead
    candidate: _Path | None = None  # from where it looks ahead, if it does


class Paths:
    """The paths of one trajectory, which begin with `row`. Further rows have its number plus a multiple of `rows`."""

    def __init__(self, how: Candidates, row: _Row, rows: int, example: Any, responder: Responder) -> None:
        self._how, self._example, self._responder = how, example, responder
        # Numbers for all candidates, and for what looks ahead from each.
        self._free = [row.index + rows * i for i in reversed(range(1, 2 * how.width * how.candidates))]
        self.first = self._grow([_Path(row)])  # the rows whose first turn begins

    def after(self, row: _Row, reply: Reply | None) -> tuple[list[_Row], list[_Row]]:
        """After a turn of `row`, the rows whose next turn begins, and those that are given up."""
        if isinstance(self._how, BestOfTrajectories) and row.stop_reason is None:
            return [row], []
        path = self._growing.pop(row.index)
        path.score = path.rank = path.score + self._score(row, reply)
        if path.candidate is not None:
            path.candidate.rank, path.left = path.score, path.left - 1
        if path.left and row.stop_reason is None:
            copied = None if path.candidate else self._copy(row)
            if copied is not None:  # what looks ahead takes the row, whose context the engine has read
                path.row, path = copied, _Path(row, path.score, left=path.left, candidate=path)
            if path.candidate is not None:
                self._growing[row.index] = path
                return [row], []
        given_up, kept = [row] if path.candidate else [], list[_Path]()
        if not self._growing:
            ranked = sorted(self.paths, key=lambda each: -each.rank)
            kept, lost = ranked[: self._how.width], ranked[self._how.width :]
            given_up += [each.row for each in lost]
            if self._how.width == 1:
                segments, turn = kept[0].row.segments, kept[0].row.last_turn
                segments[segments.index(turn, -2)] = replace(turn, scores=tuple(each.rank for each in ranked))
        self._free += [each.index for each in given_up]
        return self._grow(kept) if kept else [], given_up

    def _grow(self, kept: Sequence[_Path]) -> list[_Row]:
        """Begin the candidates for the next turn of each path that has not ended, the first of them in its row."""
        self.paths: list[_Path] = []  # candidates, and paths that have ended; the best first if no candidate is left
        for path in kept:
            copies = [self._copy(path.row) for _ in range(self._how.candidates - 1) if path.row.stop_reason is None]
            before = path.score if self._how.width > 1 else 0.0
            self.paths += [_Path(row, before, before, self._how.depth) for row in (path.row, *copies) if row]
        self._growing = {each.row.index: each for each in self.paths if each.row.stop_reason is None}
        return [each.row for each in self._growing.values()]

    def _copy(self, row: _Row) -> _Row | None:
        index = self._free[-1]
        if not self._responder.branch(row.index, index):
            return None
        return replace(row, index=self._free.pop(), segments=[*row.segments])

    def _score(self, row: _Row, reply: Reply | None) -> float:
        if row.stop_reason is not None and row.stop_reason.is_infrastructure_failure:
            return -math.inf
        scored = (row.last_turn, reply) if isinstance(self._how, BestOfTurns) else (row.finished(),)
        if not math.isfinite(score := self._how.score(self._example, *scored)):
            raise ValueError(f"`score` returned {score!r}, but must return a finite number")
        return float(score)
