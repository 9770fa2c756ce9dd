"""The rows of a rollout: which slot each is in, and in which order their contexts are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
    slot: int | None = None
    """The slot that the row was given, if any."""
    home: int | None = None
    """The slot that holds its keys and values until `SlotTable._settle` moves them."""
    context: tuple[int, ...] = ()
    limit: int = 0
    stops: tuple[str, ...] = ()
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    busy: bool = False
    """Whether it generates or waits to."""

    def begin(self, context: Sequence[int], limit: int, stops: Sequence[str]) -> None:
        self.context, self.limit, self.stops, self.busy = tuple(context), limit, tuple(stops), True
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
    """Gives rows their slots and grows the cache as needed. The first `decoding` slots hold the rows that decode.

    `most_tokens` is the number of positions that all slots together may have.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.cache = SlotCache(0, 0)
        self.decoding = 0
        self._rows: list[Row | None] = []
        self._left: dict[int, int] = {}
        """Slots that rows gave up but that are not cleared yet -> how many positions to clear."""

    def decoding_rows(self) -> list[Row]:
        return [row for row in self._rows[: self.decoding] if row is not None]

    def placed(self) -> list[Row]:
        return [row for row in self._rows if row is not None]

    def extent(self) -> tuple[int, int]:
        """How many rows have a slot, and the most positions that any of them may need."""
        placed = self.placed()
        return len(placed), max((row.reach for row in placed), default=0)

    def extent_with(self, row: Row, extent: tuple[int, int]) -> tuple[int, int]:
        """The `extent` with one more row, which may already have a slot."""
        return extent[0] + (row.slot is None), max(extent[1], row.reach)

    def has_room(self, extent: tuple[int, int]) -> bool:
        return extent[0] * extent[1] <= self.most_tokens

    def place(self, row: Row) -> None:
        if row.slot is None:
            if None not in self._rows:
                self._rows.append(None)
            row.slot = self._rows.index(None)
            self._rows[row.slot] = row

    def make_room(self, needed: int) -> None:
        """Give each slot `needed` positions or more, within `most_tokens`, and move what rows hold to their slots."""
        occupied = len(self.placed())
        capacity = self.cache.capacity
        if needed > capacity:
            roomy = -(-max(needed, int(capacity * _GROWTH)) // _STEP) * _STEP
            capacity = max(needed, roomy)
        capacity = max(needed, min(capacity, self.most_tokens // occupied))
        slots = max(len(self._rows), self.cache.slots)
        if slots * capacity > self.most_tokens:
            self._compact()
            slots = len(self._rows)
        self._settle(slots, capacity)

    def _compact(self) -> None:
        """Move the last rows into empty slots, and drop the slots that this leaves at the end."""
        while None in self._rows:
            last = self._rows[-1]
            if last is not None:
                self.move(last, self._rows.index(None))
            self._rows.pop()

    def move(self, row: Row, slot: int) -> None:
        """Swap a row with the row in another slot. `_settle` moves their keys and values."""
        assert row.slot is not None
        other = self._rows[slot]
        self._rows[row.slot], self._rows[slot] = other, row
        if other is not None:
            other.slot = row.slot
        row.slot = slot

    def line_up(self, batches: Sequence[list[Row]]) -> None:
        """Place batches one by one behind the rows that decode, each in the order that moves the fewest rows."""
        first = self.decoding
        for batch in batches:
            places = set(range(first, first + len(batch)))
            free = iter(sorted(places - {row.slot for row in batch}))
            for row in batch:
                if row.slot not in places:
                    self.move(row, next(free))
            batch.sort(key=lambda row: row.slot or 0)
            first += len(batch)

    def _settle(self, slots: int, capacity: int) -> None:
        """Move all keys and values at once to where their rows are, with zeros elsewhere."""
        cache = self.cache
        grows = (slots, capacity) != (cache.slots, cache.capacity)
        movers = [row for row in self.placed() if row.cached and (grows or row.home != row.slot)]
        homes = {row.home: len(row.cached) for row in movers if row.home is not None}
        targets = [row.slot for row in movers if row.slot is not None]
        length = max((*self._left.values(), *homes.values()), default=0)
        if grows:
            length = min(length, capacity)
            cache.rebuild(slots, capacity, list(homes), targets, length)
        elif movers:
            cache.copy(list(homes), targets, length)
        if not grows and (left := (self._left.keys() | homes.keys()) - set(targets)):
            cache.clear(sorted(left), 0, length)
        self._left = {}
        for row in self.placed():
            row.home = row.slot

    def copy(self, twins: Sequence[tuple[Row, Row]]) -> None:
        """Give the second row of each pair what the first one holds."""
        if not twins:
            return
        for row, twin in twins:
            twin.cached, twin.routes = list(row.cached), list(row.routes)
        pairs = [(row.slot, twin.slot) for row, twin in twins if row.slot is not None and twin.slot is not None]
        sources, targets = zip(*pairs, strict=True)
        self.cache.copy(sources, targets, max(len(row.cached) for row, _ in twins))

    def truncate(self, row: Row, length: int) -> None:
        """Drop the row's cached tokens from index `length` on."""
        if row.home is not None and length < len(row.cached):
            self.cache.clear([row.home], length, len(row.cached))
            del row.cached[length:], row.routes[length:]

    def park(self, row: Row) -> None:
        """Stop decoding a row. It keeps a slot."""
        self.decoding -= 1
        self.move(row, self.decoding)
        row.busy = False

    def give_up(self, row: Row) -> None:
        """Take the slot of a row that does not decode, and drop its contents."""
        if row.cached and row.home is not None:
            self._left[row.home] = len(row.cached)
        if row.slot is not None:
            self._rows[row.slot] = None
        row.slot = row.home = None
        row.cached, row.routes = [], []


@dataclass(frozen=True)
class Stage:
    """The prefill of one poll."""

    batches: list[list[Row]]
    """The rows to read, batched with rows of about the same length."""
    twins: list[tuple[Row, Row]]
    """Pairs of a row that is read and a row with the same context, which gets a copy."""

    def rows(self) -> list[Row]:
        """All rows: first those that are read, then those that get copies."""
        return [*(row for batch in self.batches for row in batch), *(twin for _, twin in self.twins)]

    def sources(self) -> list[int]:
        """For each of `rows`, the index of the row that was read and has its logits."""
        place = {row.index: i for i, row in enumerate(self.rows())}
        return [*range(len(place) - len(self.twins)), *(place[row.index] for row, _ in self.twins)]


def plan(started: Sequence[Row], most_tokens: int) -> Stage:
    """Read a context once for all rows that share it, except those with part of it cached; batch rows by length.

    A batch has at most `most_tokens` tokens, padding included, unless it is a single row.
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
    return Stage(_batches(readers, most_tokens), pairs)


def _batches(rows: Sequence[Row], most_tokens: int) -> list[list[Row]]:
    """`rows` come shortest first, so the last row of a batch gives its width."""
    batches: list[list[Row]] = []
    for row in rows:
        width = len(row.context) - len(row.cached)
        if batches and (len(batches[-1]) + 1) * width <= most_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
