"""Contexts in which attributes of modules are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def within_and_recomputed(modules: Iterable[Any], context: Callable[[], Any]) -> Iterator[None]:
    """Enter a context made by `contextmanager`; gradient checkpointing enters it again when it recomputes.

    Backward runs outside the context, where reentrant checkpointing would silently compute the wrong gradients.
    """

    def entering(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        return lambda function, *args, **options: checkpoint(context()(function), *args, **options)

    checkpointed = [each for each in modules if getattr(each, "gradient_checkpointing", False)]
    with context(), replaced(checkpointed, _gradient_checkpointing_func=entering):
        yield


@contextmanager
def replaced(holders: Sequence[Any], **new: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which the named attributes of each holder are replaced by what the functions make of them."""
    before = [(holder, name, getattr(holder, name)) for holder in holders for name in new]
    for holder, name, value in before:
        setattr(holder, name, new[name](value))
    try:
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)
