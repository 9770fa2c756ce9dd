"""The ways to run one scripted rollout that `benchmarks.rollout` compares, each measured in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GenerationConfig

from benchmarks.rollout.script import PROTOCOL, Cell, Interval, Script, ScriptedSearch, build_model
from benchmarks.rollout.trl_loop import trl_loop
from sorl_trl.rollout import (
    Collector,
    Engine,
    EngineOptions,
    Generation,
    HFGenerator,
    LockStepEngine,
    SlotEngine,
    TurnEnd,
)
from sorl_trl.types import Trajectory

REJOIN_AFTER = EngineOptions().rejoin_after
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


class Scripted(Engine):
    """Ends each turn of another engine where the script says so, and remembers when it generated."""

    def __init__(self, inner: Engine, script: Script) -> None:
        super().__init__()
        self.inner, self._script = inner, script
        self.window, self.in_steps, self.in_turns = inner.window, inner.in_steps, inner.in_turns
        self._turn = [0] * len(script.turns)
        self.intervals: list[Interval] = []

    def open(self, rows: int) -> None:
        self.inner.open(rows)

    def submit(self, row: int, context_ids: Sequence[int], limit: int) -> None:
        self.inner.submit(row, context_ids, min(limit, self._script.turns[row][self._turn[row]]))

    def poll(self) -> list[tuple[int, Generation]]:
        began = time.perf_counter()
        ended = self.inner.poll()
        self.intervals.append((began, time.perf_counter()))
        return [(row, self._closed(row, generation)) for row, generation in ended]

    def _closed(self, row: int, generation: Generation) -> Generation:
        last = self._script.last_token(row, self._turn[row])
        self._turn[row] += 1
        return Generation((*generation.token_ids[:-1], last), generation.logprobs, stopped=True)

    def release(self, row: int) -> None:
        self.inner.release(row)

    def wake(self) -> None:
        self.inner.wake()

    @property
    def idle(self) -> bool:
        return self.inner.idle

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class Setting:
    """What an engine is built of."""

    cell: Cell
    script: Script
    search: ScriptedSearch
    rejoin_after: int = REJOIN_AFTER


@dataclass(frozen=True)
class Work:
    """What a rollout has computed, and when."""

    prefilled_tokens: int
    generating: list[Interval]


Rollout = Callable[[], Work]


class Collected:
    """The rollout by our collector, with the engine that a function builds of model, script and sampling."""

    def __init__(self, setting: Setting, build: Callable[[Any, Script, GenerationConfig], Engine]) -> None:
        self._script = script = setting.script
        model = build_model(setting.cell, script.tokenizer)
        config = GenerationConfig(**SAMPLED)  # type: ignore[no-untyped-call]
        self._engine = Scripted(build(model, script, config), script)
        self.collector = Collector(
            script.tokenizer, setting.search, PROTOCOL, script.limits, rejoin_after=setting.rejoin_after
        )

    def __call__(self) -> Work:
        with torch.no_grad():
            trajectories = self.collector.collect(self._script.prompts, self._engine)
        check_script(self._script, trajectories)
        return Work(self._engine.inner.prefilled_tokens, self._engine.intervals)


def lockstep(model: Any, script: Script, config: GenerationConfig) -> Engine:
    """All rows generate, then all search: `model.generate` for each turn."""
    return LockStepEngine(HFGenerator(model, script.tokenizer, (), config, [script.tokenizer.eos_token_id]))


def slots_event(model: Any, script: Script, config: GenerationConfig) -> Engine:
    """No row waits for another."""
    return SlotEngine(model, TurnEnd(script.tokenizer, (), [script.tokenizer.eos_token_id]), config)


ENGINES: dict[str, Callable[[Setting], Rollout]] = {
    "trl_loop": trl_loop,
    **{build.__name__: partial(Collected, build=build) for build in (lockstep, slots_event)},
}


def check_script(script: Script, trajectories: Sequence[Trajectory]) -> None:
    """Raise RuntimeError unless the trajectories are those of the script."""
    for row, trajectory in enumerate(trajectories):
        turns = [len(turn.token_ids) for turn in trajectory.turns]
        read = [list(observation.token_ids) for observation in trajectory.observations]
        if turns != script.turns[row] or read != script.observations[row]:
            raise RuntimeError(f"row {row} has turns of {turns} tokens instead of {script.turns[row]}")


def measure(engine: str, cell: Cell, rejoin_after: int = REJOIN_AFTER) -> dict[str, Any]:
    """One row of the result. Only the rollout is measured: the model is there, and has been run once."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    script = Script(cell)
    search = ScriptedSearch(script)
    roll_out = ENGINES[engine](Setting(cell, script, search, rejoin_after))
    began, cpu_began = time.perf_counter(), time.process_time()
    work = roll_out()
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    low, high = cell.turn_tokens
    return {
        "engine": engine,
        **asdict(cell),
        "turn_tokens": f"{low}-{high}",
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "prefilled_over_needed": work.prefilled_tokens / script.needed_tokens,
        "waiting_seconds": outside(search.intervals, work.generating),
        "rejoin_after": rejoin_after,
        "sampled_tokens": sum(map(sum, script.turns)),
    }


def outside(intervals: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Seconds that lie in at least one of `intervals` and in none of `others`."""
    return covered([*intervals, *others]) - covered(others)


def covered(spans: Sequence[Interval]) -> float:
    """Seconds that lie in at least one span."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
