"""The rows of a rollout: which slot each is in, and in which order their contexts are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sorl_trl.rollout.engines.base import TurnRequest
from sorl_trl.rollout.engines.slots.cache import SlotCache

_STEP = 64  # capacities are rounded up to a multiple
_GROWTH = 1.5


@dataclass(eq=False)
class Row:
    """The contents of a row's slot, and the turn that it generates or waits to generate."""

    index: int
    random: np.random.Generator | None
    cached: list[int] = field(default_factory=list)
    """The token ids whose keys and values are in the slot."""
    routes: list[np.ndarray[Any, Any]] = field(default_factory=list)
    """What the engine reports of each cached token, if it does."""
    slot: Any = None
    """The number of its slot, if it has one."""
    context: tuple[int, ...] = ()
    limit: int = 0
    stops: Sequence[str] = ()
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    busy: bool = False
    """Whether it generates or waits to."""

    def begin(self, request: TurnRequest) -> None:
        self.context, self.limit, self.stops, self.busy = tuple(request.token_ids), request.limit, request.stops, True
        self.sampled, self.logprobs = [], []

    def known(self) -> int:
        """How many cached tokens the context begins with; 0 if it diverges. The context's last token is reread."""
        most = min(len(self.cached), len(self.context) - 1)
        return most if tuple(self.cached[:most]) == self.context[:most] else 0

    @property
    def reach(self) -> int:
        """The most positions needed until its turn ends. A turn does not read the last token that it samples."""
        return max(len(self.context) + self.limit - 1 if self.busy else 0, len(self.cached))


class SlotTable:
    """Gives rows their slots, and grows the cache as needed.

    `most_tokens` is the number of positions that all slots together may have.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.cache = SlotCache()
        self.decoding: list[Row] = []
        self._rows: list[Row | None] = []

    def placed(self) -> list[Row]:
        return [row for row in self._rows if row is not None]

    def has_room(self, row: Row) -> bool:
        """Whether all slots, with one for this row, may have as many positions as any of their rows may need."""
        rows = {*self.placed(), row}
        return len(rows) * max(each.reach for each in rows) <= self.most_tokens

    def evict_for(self, row: Row) -> None:
        """Take slots from other rows, which wait for a reply, until there is room for this one."""
        for other in self.placed():
            if other is not row and not self.has_room(row):
                self.give_up(other)

    def place(self, row: Row) -> None:
        if row.slot is None:
            if None not in self._rows:
                self._rows.append(None)
            row.slot = self._rows.index(None)
            self._rows[row.slot] = row

    def make_room(self, needed: int) -> None:
        """Give each slot `needed` positions or more, within `most_tokens`."""
        placed = self.placed()
        capacity = self.cache.capacity
        if needed > capacity:
            roomy = -(-max(needed, int(capacity * _GROWTH)) // _STEP) * _STEP
            capacity = max(needed, roomy)
        capacity = max(needed, min(capacity, self.most_tokens // len(placed)))
        slots = max(len(self._rows), self.cache.slots)
        homes = [row.slot for row in placed]
        if slots * capacity > self.most_tokens:  # leave no slot empty
            self._rows, slots = [*placed], len(placed)
            for slot, row in enumerate(placed):
                row.slot = slot
        if (slots, capacity) != (self.cache.slots, self.cache.capacity):
            moves = [(home, row.slot) for home, row in zip(homes, placed, strict=True) if row.cached]
            length = max((len(row.cached) for row in placed), default=0)
            self.cache.rebuild(slots, capacity, moves, length)

    def copy(self, twins: Sequence[tuple[Row, Row]]) -> None:
        """Give the second row of each pair what the first one holds."""
        for row, twin in twins:
            twin.cached, twin.routes = list(row.cached), list(row.routes)
        if twins:
            length = max(len(row.cached) for row, _ in twins)
            self.cache.copy([(row.slot, twin.slot) for row, twin in twins], length)

    def truncate(self, row: Row, length: int) -> None:
        """Drop the row's cached tokens from index `length` on."""
        if length < len(row.cached):
            self.cache.clear(row.slot, length, len(row.cached))
            del row.cached[length:], row.routes[length:]

    def give_up(self, row: Row) -> None:
        """Take the slot of a row that does not decode, and drop its contents."""
        self.truncate(row, 0)
        if row.slot is not None:
            self._rows[row.slot] = None
        row.slot = None


def plan(started: Sequence[Row], most_tokens: int) -> tuple[list[list[Row]], list[tuple[Row, Row]]]:
    """Which rows to read, in batches, and pairs of a row that is read and one with the same context, for a copy.

    A row with part of its context cached is always read. Batches have rows of about the same length, and at most
    `most_tokens` tokens, padding included, unless one is a single row.
    """
    readers: list[Row] = []
    twins: dict[tuple[int, ...], list[Row]] = {}
    for row in sorted(started, key=lambda row: (len(row.context) - len(row.cached), row.index)):
        if row.context in twins and not row.cached:
            twins[row.context].append(row)
        else:
            twins.setdefault(row.context, [])
            readers.append(row)
    pairs = [(row, twin) for row in readers for twin in twins.pop(row.context, [])]
    batches: list[list[Row]] = []
    for row in readers:  # the shortest first, so the last row of a batch gives its width
        width = len(row.context) - len(row.cached)
        if batches and (len(batches[-1]) + 1) * width <= most_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches, pairs
