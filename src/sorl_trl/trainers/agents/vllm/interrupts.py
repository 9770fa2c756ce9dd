"""Ctrl-C, held back where it would tear something."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Let the first Ctrl-C take effect after the block; the second takes effect at once.

    An exception in the middle of vLLM's step would leave its scheduler and its model with different ideas of what has
    been computed, and the next rollout would be wrong or fail.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if pressed:
            signal.signal(signal.SIGINT, handler)
            handler(number, frame)
        pressed.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        handler(*pressed[0])
