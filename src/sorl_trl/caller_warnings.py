"""TRL's warnings point at the line that calls a trainer or a config. Here our own frames stand in between."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_PACKAGE = __name__.partition(".")[0]


@contextmanager
def warnings_at_the_caller() -> Iterator[None]:
    """Warnings that would point at a line of this package point at the line that called it instead.

    `stacklevel` is raised where `warnings.warn` is called, so that the filters decide there and then, by the user's
    module and line.
    """
    warn = warnings.warn

    def warn_at_the_caller(
        message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **options: Any
    ) -> None:
        stacklevel += _frames_of_ours(stacklevel)
        warn(message, category, stacklevel + 1, *args, **options)

    warnings.warn = warn_at_the_caller
    try:
        yield
    finally:
        warnings.warn = warn


def _frames_of_ours(stacklevel: int) -> int:
    """How many frames further up the first one stands that is not ours, counted from where `warn` is called."""
    try:
        frame: FrameType | None = sys._getframe(stacklevel + 1)
    except ValueError:  # the stack is not so deep: Python knows what to make of it
        return 0
    count = 0
    while frame is not None and _is_ours(frame):
        frame, count = frame.f_back, count + 1
    return count if frame is not None else 0


def _is_ours(frame: FrameType) -> bool:
    """Whether it runs code of this package, or an `__init__` that `dataclass` has written."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package == _PACKAGE or (frame.f_code.co_filename == "<string>" and frame.f_code.co_name == "__init__")
