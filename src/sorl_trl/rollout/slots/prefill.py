"""In which order, and how many at a time, contexts are put through the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sorl_trl.rollout.slots.rows import Row


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
