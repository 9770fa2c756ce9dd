"""The rows of a rollout, which of them stands in which slot, and in which order contexts are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sorl_trl.rollout.slots.cache import SlotCache

_STEP = 64  # capacities are multiples of it
_GROWTH = 1.5


@dataclass(eq=False)
class Row:
    """One row: what it has in its slot, and the turn that it generates or waits to."""

    index: int
    draws: Iterator[float] | None
    cached: list[int] = field(default_factory=list)
    """The ids whose keys and values are in the slot."""
    slot: int | None = None
    """Where it stands."""
    home: int | None = None
    """Where its keys and values lie, until `SlotTable.settle` moves them."""
    context: tuple[int, ...] = ()
    limit: int = 0
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    busy: bool = False
    """Generating, or waiting to."""
    parked_at: int = 0
    """Which of all turns that have ended its last one was."""

    def begin(self, context: Sequence[int], limit: int) -> None:
        self.context, self.limit, self.busy = tuple(context), limit, True
        self.sampled, self.logprobs = [], []

    def known(self) -> int:
        """Tokens of the context that are in the slot, if it holds no other context; the last is computed again."""
        most = min(len(self.cached), len(self.context) - 1)
        return most if tuple(self.cached[:most]) == self.context[:most] else 0

    @property
    def reach(self) -> int:
        """Positions that it takes at the most until its turn has ended; the last token is not read in it."""
        return max(len(self.context) + self.limit - 1 if self.busy else 0, len(self.cached))


class SlotTable:
    """Places rows: those that decode stand in the first slots, `decoding` of them. Grows the cache as rows need it.

    `most_tokens` is the room of all slots together.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.cache = SlotCache(0, 0)
        self.decoding = 0
        self._rows: list[Row | None] = []
        self._left: dict[int, int] = {}
        """Slots with something that nobody holds any more, and how many positions of it."""

    def decoding_rows(self) -> list[Row]:
        return [row for row in self._rows[: self.decoding] if row is not None]

    def placed(self) -> list[Row]:
        return [row for row in self._rows if row is not None]

    def extent(self) -> tuple[int, int]:
        """The rows that have a slot, and the positions that the longest of them takes at the most."""
        placed = self.placed()
        return len(placed), max((row.reach for row in placed), default=0)

    def extent_with(self, row: Row, extent: tuple[int, int]) -> tuple[int, int]:
        """The same with one row more, which may have a slot already."""
        return extent[0] + (row.slot is None), max(extent[1], row.reach)

    def has_room(self, extent: tuple[int, int]) -> bool:
        return extent[0] * extent[1] <= self.most_tokens

    def place(self, row: Row) -> None:
        """Give the row a slot."""
        if row.slot is None:
            if None not in self._rows:
                self._rows.append(None)
            row.slot = self._rows.index(None)
            self._rows[row.slot] = row

    def make_room(self, needed: int) -> None:
        """Have `needed` positions in each slot, the cache no larger than allowed, and all rows where they stand."""
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
        """Leave no slot empty."""
        while None in self._rows:
            last = self._rows[-1]
            if last is not None:
                self.move(last, self._rows.index(None))
            self._rows.pop()

    def move(self, row: Row, slot: int) -> None:
        """Have the row stand in a slot; who stands there changes places with it. What they hold follows later."""
        assert row.slot is not None
        other = self._rows[slot]
        self._rows[row.slot], self._rows[slot] = other, row
        if other is not None:
            other.slot = row.slot
        row.slot = slot

    def line_up(self, batches: Sequence[list[Row]]) -> None:
        """Have batches stand one after the other behind the rows that decode, each in whatever order moves least."""
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
        """Have keys and values lie where their rows stand, and zeros elsewhere; with all moves at once."""
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
        """Have the second row of each pair hold what the first one does."""
        if not twins:
            return
        for row, twin in twins:
            twin.cached = list(row.cached)
        pairs = [(row.slot, twin.slot) for row, twin in twins if row.slot is not None and twin.slot is not None]
        sources, targets = zip(*pairs, strict=True)
        self.cache.copy(sources, targets, max(len(row.cached) for row, _ in twins))

    def truncate(self, row: Row, length: int) -> None:
        """Forget what the row holds from `length` on."""
        if row.home is not None and length < len(row.cached):
            self.cache.clear([row.home], length, len(row.cached))
            del row.cached[length:]

    def park(self, row: Row) -> None:
        """Take a row out of the decoding ones; it keeps a slot."""
        self.decoding -= 1
        self.move(row, self.decoding)
        row.busy = False

    def give_up(self, row: Row) -> None:
        """Take a row that does not decode out of its slot, and forget what it holds."""
        if row.cached and row.home is not None:
            self._left[row.home] = len(row.cached)
        if row.slot is not None:
            self._rows[row.slot] = None
        row.slot = row.home = None
        row.cached = []


@dataclass(frozen=True)
class Stage:
    """The prefill of one poll."""

    batches: list[list[Row]]
    """The rows that are read, together with those of about the same length."""
    twins: list[tuple[Row, Row]]
    """Rows that are read, with those that have the same context and get a copy."""

    def rows(self) -> list[Row]:
        """All: first those that are read, then the copies."""
        return [*(row for batch in self.batches for row in batch), *(twin for _, twin in self.twins)]

    def sources(self) -> list[int]:
        """For each of `rows`, which of those that are read has its logits."""
        place = {row.index: i for i, row in enumerate(self.rows())}
        return [*range(len(place) - len(self.twins)), *(place[row.index] for row, _ in self.twins)]


def plan(started: Sequence[Row], most_tokens: int) -> Stage:
    """Have rows with nothing cached and the same context read once; put rows of about the same length together.

    A batch has at most `most_tokens` tokens, padding included, or is one row.
    """
    readers: list[Row] = []
    twins: dict[tuple[int, ...], list[Row]] = {}
    for row in sorted(started, key=lambda row: (len(row.context) - len(row.cached), row.index)):
        if row.cached:
            readers.append(row)
        elif row.context in twins:
            twins[row.context].append(row)
        else:
            twins[row.context] = []
            readers.append(row)
    pairs = [(row, twin) for row in readers if not row.cached for twin in twins[row.context]]
    return Stage(_batches(readers, most_tokens), pairs)


def _batches(rows: Sequence[Row], most_tokens: int) -> list[list[Row]]:
    """Rows come shortest first, so that the last of a batch says how wide it is."""
    batches: list[list[Row]] = []
    for row in rows:
        width = len(row.context) - len(row.cached)
        if batches and (len(batches[-1]) + 1) * width <= most_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
