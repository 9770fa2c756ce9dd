"""Where the time of one rollout went, row by row."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from sorl_trl.rollout.engine import Engine
from sorl_trl.rollout.generation import Generation


class Phase(str, Enum):
    """What a row is doing; between its phases it waits for others."""

    PREFILL = "prefill"
    """Its context goes through the model. Engines that do not tell show it as decoding."""
    DECODE = "decode"
    """Of an engine that generates in turns, as long as its share of tokens in the longest turn says."""
    SEARCH = "search"
    """The environment answers it, be it a search or another tool."""


@dataclass(frozen=True)
class Span:
    """One phase of one row, in seconds since the rollout began."""

    row: int
    phase: Phase
    start_s: float
    end_s: float


@dataclass
class Timeline:
    """The phases of all rows of one rollout, and what the rollout itself spent its time on."""

    rows: int
    seconds: float = 0.0
    """Of the whole rollout."""
    seconds_generating: float = 0.0
    """In which the engine was being polled."""
    sampled_tokens: int = 0
    spans: list[Span] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    """When the rollout stood still for a reply, from when to when: no row was decoding then."""
    ended_s: dict[int, float] = field(default_factory=dict)
    """When each trajectory ended, by row."""

    @property
    def seconds_waiting(self) -> float:
        """In which the rollout stood still for a reply."""
        return sum(end - start for start, end in self.waits)

    @property
    def seconds_searching(self) -> float:
        """In which at least one row was being answered: overlaps are counted once."""
        return covered((span.start_s, span.end_s) for span in self.spans if span.phase is Phase.SEARCH)


class Recorder:
    """Records the timeline of a rollout while it goes on."""

    def __init__(self, rows: int) -> None:
        self.timeline = Timeline(rows)
        self._began = time.perf_counter()
        self._generating_since: dict[int, float] = {}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time in which there is nothing to do but wait."""
        began = self._now()
        yield
        self.timeline.waits.append((began, self._now()))

    def submitted(self, row: int) -> None:
        self._generating_since[row] = self._now()

    def poll(self, engine: Engine) -> list[tuple[int, Generation]]:
        """What the engine's poll gives."""
        began = self._now()
        ended = engine.poll()
        now = self._now()
        self.timeline.seconds_generating += now - began
        for row in engine.prefilled:
            self._add(row, Phase.PREFILL, began, now)
            self._generating_since[row] = now
        longest = max((len(generation.token_ids) for _, generation in ended), default=0)
        for row, generation in ended:
            size = len(generation.token_ids)
            start = self._generating_since.pop(row, now)
            # One poll for turns of any length: a row that ended its own waited for the others in steps of that poll.
            share = size / longest if engine.in_turns else 1.0
            self._add(row, Phase.DECODE, start, start + share * (now - start))
            self.timeline.sampled_tokens += size
        return ended

    def asked(self, row: int, reply: Future[Any]) -> None:
        """The environment is answering a row."""
        reply.add_done_callback(partial(self._replied, row, self._now()))

    def ended(self, row: int) -> None:
        self.timeline.ended_s[row] = self._now()

    def finish(self) -> Timeline:
        self.timeline.seconds = self._now()
        return self.timeline

    def _replied(self, row: int, asked_s: float, reply: Future[Any]) -> None:
        self._add(row, Phase.SEARCH, asked_s, self._now())

    def _add(self, row: int, phase: Phase, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.timeline.spans.append(Span(row, phase, start_s, end_s))

    def _now(self) -> float:
        return time.perf_counter() - self._began


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one span."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
