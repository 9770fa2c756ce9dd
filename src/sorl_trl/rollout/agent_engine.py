"""An engine for agents with weights of their own: one engine for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from sorl_trl.rollout.engine import Engine, Generation


class AgentEngine(Engine):
    """Samples each agent's turns with an engine of its own, which reads whole contexts with the agent's weights.

    Keys and values of the same tokens differ between agents, so each engine keeps its own, in its share of memory.

    Args:
        engines: By the name of the agent, all of one kind, and none of which polls together with other ranks.
        active: Within `active(name)`, the model has the weights of this agent.
    """

    def __init__(self, engines: Mapping[str, Engine], active: Callable[[str], AbstractContextManager[None]]) -> None:
        self._engines, self._active = engines, active
        self.in_turns = any(engine.in_turns for engine in engines.values())

    def open(self, rows: int) -> None:
        for engine in self._engines.values():
            engine.memory_share = 1 / len(self._engines)
            engine.open(rows)
        self.window = min((e.window for e in self._engines.values() if e.window is not None), default=None)

    def of_agent(self, agent: str) -> Engine:
        """See `Engine.of_agent`. Raises ValueError for an agent without weights."""
        if agent not in self._engines:
            raise ValueError(f"A turn is due of the agent {agent!r}, but only {[*self._engines]} have weights.")
        return self._engines[agent]

    def submit(self, *turn: Any, **options: Any) -> None:
        """A turn of no agent; raises ValueError."""
        self.of_agent("").submit(*turn, **options)

    def poll(self) -> list[tuple[int, Generation]]:
        ended: list[tuple[int, Generation]] = []
        for agent, engine in self._engines.items():
            if not engine.idle:
                with self._active(agent):
                    ended += engine.poll()
        return ended

    def release(self, row: int) -> None:
        for engine in self._engines.values():
            engine.release(row)

    @property
    def idle(self) -> bool:
        return all(engine.idle for engine in self._engines.values())

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
