"""Driving an engine without a collector, and interrupting it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sorl_trl.rollout import Engine, Generation, generate_turns


def take_turns(
    engine: Engine, contexts: Sequence[Sequence[int]], limits: Sequence[int], rows: Sequence[int] | None = None
) -> list[Generation]:
    """One turn each of `rows`, by default the first ones, in a rollout of its own."""
    engine.open(len(contexts))
    try:
        return generate_turns(engine, contexts, limits, rows)
    finally:
        engine.close()


@contextmanager
def ctrl_c_is_heard() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also in a process that was started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
