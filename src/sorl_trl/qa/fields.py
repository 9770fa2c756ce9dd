"""Checks of single values from files: each returns the value, or raises a ValueError that names the field."""

from __future__ import annotations


def identifier(name: str, value: object) -> str:
    """A string or an integer, as a string."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"`{name}` must be a string or an integer, got {value!r}")
    return str(value)


def text(name: str, value: object) -> str:
    """A string that is not blank and that can be encoded."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"`{name}` must be a string that is not blank, got {value!r}")
    value.encode()  # Half a surrogate pair, which JSON can spell, cannot be encoded by any tokenizer.
    return value
