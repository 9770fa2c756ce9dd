"""Passages as JSON: what a cache and a recording write, read back exactly, scores included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from sorl_trl.types import Passage

FIELDS = {field.name for field in fields(Passage)}


def to_records(passages: Sequence[Passage]) -> list[dict[str, object]]:
    """One JSON object per passage."""
    return [dict(vars(passage)) for passage in passages]


def from_records(records: object) -> tuple[Passage, ...]:
    """The passages of `to_records`. Raises `ValueError` for anything else."""
    if not isinstance(records, list):
        raise ValueError(f"passages must be a list, got {type(records).__name__}")
    return tuple(_passage(record) for record in records)


def _passage(record: object) -> Passage:
    if not isinstance(record, dict) or record.keys() != FIELDS:
        raise ValueError(f"not a passage (an object with {', '.join(sorted(FIELDS))}), got {str(record)[:80]!r}")
    for name in ("id", "title", "text"):
        if not isinstance(record[name], str):
            raise ValueError(f"not a passage (`{name}` must be a string, got {record[name]!r})")
    score = record["score"]
    if isinstance(score, bool) or not isinstance(score, int | float | None):
        raise ValueError(f"not a passage (`score` must be a number or null, got {score!r})")
    return Passage(**record)
