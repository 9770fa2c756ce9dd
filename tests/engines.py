"""Driving an engine without a collector."""

from __future__ import annotations

from collections.abc import Sequence

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
