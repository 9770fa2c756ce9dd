"""Passages as JSON: what a cache and a recording write, read back exactly, scores included."""

from __future__ import annotations

from collections.abc import Sequence

from sorl_trl.types import Passage


def to_records(passages: Sequence[Passage]) -> list[dict[str, object]]:
    """One JSON object per passage."""
    return [dict(vars(passage)) for passage in passages]


def from_records(records: object) -> tuple[Passage, ...]:
    """The passages of `to_records`. Raises `ValueError` for anything else."""
    if not isinstance(records, list):
        raise ValueError(f"passages must be a list, got {type(records).__name__}")
    try:
        return tuple(Passage(**record) for record in records)
    except TypeError as error:
        raise ValueError(f"not a passage ({error})") from error
