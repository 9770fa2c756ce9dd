"""Driving an engine without a collector."""

from __future__ import annotations

from collections.abc import Sequence

from sorl_trl.rollout import Generation
from sorl_trl.rollout.engine import Engine


def take_turns(engine: Engine, contexts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[Generation]:
    """One turn of each row, in a rollout of its own."""
    engine.open(len(contexts))
    try:
        for row, (context, limit) in enumerate(zip(contexts, limits, strict=True)):
            engine.submit(row, context, limit)
        ended = poll_all(engine)
    finally:
        engine.close()
    return [ended[row] for row in range(len(contexts))]


def poll_all(engine: Engine) -> dict[int, Generation]:
    """The turns of all rows that generate."""
    ended: dict[int, Generation] = {}
    while not engine.idle:
        ended |= dict(engine.poll())
    return ended
