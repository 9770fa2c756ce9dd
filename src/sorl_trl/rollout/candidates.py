"""Candidates for turns or whole trajectories, of which the best goes on: TSR, arXiv 2602.11767.

Known from public code and second-hand. There, "beam" keeps one path, as `width=1` does here, and "lookahead" keeps, of
plain rollouts, the half of each group that is farthest from its mean, and half of the groups. Here, a beam keeps
several paths and returns the best, and `depth` samples further turns. There, a candidate gets a new environment from
the same seed, in which earlier actions are repeated; here, it gets a copy. Neither corrects for the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, SupportsFloat

from sorl_trl.checks import COUNT, POSITIVE_COUNT, check_fields
from sorl_trl.rollout.environment import Reply, Responder
from sorl_trl.types import Turn

if TYPE_CHECKING:
    from sorl_trl.rollout.collector import _Row


@dataclass(frozen=True)
class BestOfTurns:
    """Sample several candidates for each turn, let a copy of the environment answer each, and continue from the best.

    The score of a path is the sum over its turns. Of equal paths, the first is taken; one whose environment is down
    comes last. Slots, and vLLM with its prefix cache, read a context once for all its candidates. A search engine
    needs no copy, and a `Responder` makes its own (`branch`, `keep`). A copy has the random numbers of its original,
    unless its `fork` seeds it anew. In a `ToolBox`, where public methods are tools, define `__deepcopy__`.

    Raises ValueError if a number is out of range, and TypeError if `score` is no function.

    Args:
        candidates: How many turns to sample after each path.
        score: A function of a dataset row, a turn and the environment's reply (None without one) that returns a finite
            number.
        width: How many paths to keep: one is a greedy choice, more are a beam. The best one becomes the trajectory.
        depth: How many look-ahead turns to sample after each candidate. They only add their scores to the candidate's.
    """

    candidates: Annotated[int, POSITIVE_COUNT]
    score: Callable[[Mapping[str, Any], Turn, Reply | None], float]
    width: Annotated[int, POSITIVE_COUNT] = 1
    depth: Annotated[int, COUNT] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not callable(self.score):
            raise TypeError(f"`score` is {self.score!r}, but must be a function of a row, a turn and its reply")


@dataclass(frozen=True)
class BestOfTrajectories(BestOfTurns):
    """Sample several trajectories from copies of one environment, and keep the one with the best total score."""

    width: int = field(default=1, init=False)
    depth: int = field(default=0, init=False)


class Search:
    """The search for one trajectory, which begins with `row`. Its rows are numbered `row` plus multiples of `rows`."""

    def __init__(self, how: BestOfTurns, row: _Row, rows: int, example: Any, responder: Responder) -> None:
        self._how, self._example, self._responder = how, example, responder
        # Numbers for all candidates, and for what looks ahead from each.
        self._free = [row.index + rows * i for i in reversed(range(1, 2 * how.width * how.candidates))]
        self.best = row
        self._rounds = self._searched(row)
        self.first = self._next()[0]  # the rows whose first turn begins

    def after(self, row: _Row) -> tuple[list[_Row], list[_Row]]:
        """After a turn of `row`: the rows that begin their next turn, and those that are given up."""
        row.score += self._score(row)
        if isinstance(self._how, BestOfTrajectories) and row.stop_reason is None:
            return [row], []
        self._growing -= 1
        return ([], []) if self._growing else self._next()

    def _next(self) -> tuple[list[_Row], list[_Row]]:
        growing, given_up = next(self._rounds)
        self._growing = len(growing)
        return growing, given_up

    def _searched(self, row: _Row) -> Iterator[tuple[list[_Row], list[_Row]]]:
        """Yield the rows that take a turn and those that are given up, and continue when all have taken theirs."""
        how, kept = self._how, [row]
        given_up: list[_Row] = []
        while any(path.stop_reason is None for path in kept):
            if how.width == 1:  # all candidates share what came before
                kept[0].score = 0.0
            paths = [each for path in kept for each in (path, *self._copies(path, how.candidates - 1))]
            grown = [path for path in paths if path.stop_reason is None]
            yield grown, given_up
            ahead = {each: path for path in grown if how.depth for each in self._copies(path, 1)}
            for _ in range(how.depth):
                if grown := [each for each in ahead if each.stop_reason is None]:
                    yield grown, []
            rank = {path: path.score for path in paths} | {path: each.score for each, path in ahead.items()}
            paths.sort(key=lambda path: -rank[path])
            kept, given_up = paths[: how.width], [*paths[how.width :], *ahead]
            if how.width == 1:
                segments, turn = kept[0].segments, kept[0].last_turn
                segments[segments.index(turn, -2)] = replace(turn, scores=tuple(rank[path] for path in paths))
            self._free += [each.index for each in given_up]
            self.best = kept[0]
        yield [], given_up

    def _copies(self, row: _Row, count: int) -> Iterator[_Row]:
        """Copies of a row, unless it has ended or its environment is down."""
        for _ in range(count if row.stop_reason is None else 0):
            if self._responder.branch(row.index, self._free[-1]):
                yield replace(row, index=self._free.pop(), segments=[*row.segments])

    def _score(self, row: _Row) -> float:
        if row.stop_reason is not None and row.stop_reason.is_infrastructure_failure:
            return -math.inf
        score = self._how.score(self._example, row.last_turn, row.reply)
        if not isinstance(score, SupportsFloat) or not math.isfinite(score):
            raise ValueError(f"`score` returned {score!r}, but must return a finite number")
        return float(score)
