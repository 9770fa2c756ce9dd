"""TRL's tool loop with tools of several trajectories at the same time: nothing else differs."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_trl.search import SearchUnavailable
from tests.tool_runs import DONE, PATIENCE_S, TOGETHER, named, once, prepare, run
from tests.tools import Atlas, lookup, tool_call


class Ledger:
    """An environment with a state: what it answers depends on the order of its calls."""

    __slots__ = ("entries",)

    def reset(self, **row: Any) -> None:
        self.entries: list[str] = []

    def note(self, city: str) -> list[dict[str, str]]:
        before = list(self.entries)
        time.sleep(random.random() / 500)
        self.entries = [*before, city]
        return [{"type": "text", "text": f"{len(before)} before {city}"}]

    def fail(self, city: str) -> str:
        raise KeyError(city, self.entries)

    async def recall(self, city: str) -> dict[str, Any]:
        await asyncio.sleep(random.random() / 500)
        return {city: self.entries}


for method in (Ledger.note, Ledger.fail, Ledger.recall):
    method.__doc__ = lookup.__doc__


def slow(city: str) -> tuple[str, int]:
    time.sleep(random.random() / 200)
    return city, len(city)


async def later(city: str) -> dict[str, str]:
    await asyncio.sleep(random.random() / 200)
    if city == "Bern":
        raise ValueError(f"no <answer>{city}</answer>")
    return {"city": city}


named(slow, "slow")
named(later, "later")


def everything(row: int, turn: int) -> str:
    """Good and bad calls, in an order that is not the one in which they are answered."""
    city = ("Oslo", "Bern", "Lima", "Rome")[row % 4]
    if turn > row % 3:
        return DONE
    if turn == 1:
        return "\n".join([tool_call("note", city=f"{city}!"), tool_call("nowhere"), tool_call("slow", city=city)])
    calls = [
        tool_call("later", city=city),
        tool_call("note", city=city),
        tool_call("recall", city=city),
        tool_call("later", town=city),
        tool_call("slow", town=city),
        tool_call("note", city=city * 2),
        tool_call("fail", city=city),
        tool_call("slow", city=city),
    ]
    return "\n".join(calls)


@pytest.mark.parametrize("options", [TOGETHER, {**TOGETHER, "tool_timeout_s": 60.0}])
def test_nothing_differs_from_one_call_after_another(tmp_path: Path, options: dict[str, Any]) -> None:
    """Tokens, masks, messages, rewards and metrics, whatever time the tools take."""
    runs = []
    for each in ({}, options):
        trainer, seen = prepare(tmp_path, everything, each, tools=[slow, later], environment_factory=Ledger)
        runs.append((*run(trainer), seen.completions))
    (serial, metrics, messages), (together, other_metrics, other_messages) = runs
    assert other_messages == messages
    assert [message["name"] for message in messages[0] if message["role"] == "tool"] == (
        ["note", "later", "slow", "note", "fail", "slow", "later", "recall"]
    )
    assert serial.keys() == together.keys()
    for name, value in serial.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, together[name]), name
    late = other_metrics.pop("tools/timeout_frequency", 0.0)
    assert late == 0.0
    assert other_metrics == metrics
    assert metrics["tools/failure_frequency"] > 0


def meeting(parties: int) -> Any:
    """A tool that returns when so many are in it at the same time."""
    barrier = threading.Barrier(parties, timeout=PATIENCE_S)
    return named(lambda city: f"{barrier.wait() >= 0}")


def meeting_later(parties: int) -> Any:
    present = []

    async def meet(city: str) -> str:
        present.append(city)
        for _ in range(2000):
            if len(present) == parties:
                return "True"
            await asyncio.sleep(0.001)
        return "alone"

    return named(meet)


@pytest.mark.parametrize("tool", [meeting, meeting_later])
def test_tools_of_several_rows_run_at_the_same_time(tmp_path: Path, tool: Any) -> None:
    trainer, seen = prepare(tmp_path, once(tool_call("lookup", city="Oslo")), TOGETHER, tools=[tool(4)])
    run(trainer)
    assert [seen.told(row) for row in range(4)] == [[("lookup", "True")]] * 4


def test_environments_run_at_the_same_time(tmp_path: Path) -> None:
    meet = meeting(4)

    class Meeting(Atlas):
        def lookup(self, city: str) -> str:
            return str(meet(city))

    Meeting.lookup.__doc__ = lookup.__doc__
    trainer, seen = prepare(tmp_path, once(tool_call("lookup", city="Oslo")), TOGETHER, environment_factory=Meeting)
    run(trainer)
    assert [seen.told(row) for row in range(4)] == [[("lookup", "True")]] * 4


class Busy:
    """Counts who is in a tool at the same time."""

    def __init__(self) -> None:
        self.most = 0
        self.threads: set[threading.Thread] = set()
        self._inside = 0
        self._lock = threading.Lock()

    def __call__(self, city: str) -> str:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
            self.threads.add(threading.current_thread())
        time.sleep(0.002)
        with self._lock:
            self._inside -= 1
        return city


@pytest.mark.parametrize(("tool_concurrency", "tool_timeout_s"), [(1, None), (1, PATIENCE_S), (2, None), (2, 60.0)])
def test_no_more_at_the_same_time_than_allowed(
    tmp_path: Path, tool_concurrency: int, tool_timeout_s: float | None
) -> None:
    busy = Busy()
    options = {"tool_concurrency": tool_concurrency, "tool_timeout_s": tool_timeout_s}
    trainer, _ = prepare(
        tmp_path, once(*[tool_call("lookup", city="Oslo")] * 3), options, tools=[named(lambda city: busy(city))]
    )
    run(trainer)
    assert busy.most <= tool_concurrency
    is_trls = tool_concurrency == 1 and tool_timeout_s is None
    assert (busy.threads == {threading.main_thread()}) == is_trls
    assert is_trls or all(thread.daemon for thread in busy.threads), "the process could not end while a tool hangs"


def test_rows_that_share_an_environment_take_turns(tmp_path: Path) -> None:
    busy = Busy()

    class Shared(Atlas):
        def lookup(self, city: str) -> str:
            return busy(city)

    Shared.lookup.__doc__ = lookup.__doc__
    shared = Shared()
    trainer, _ = prepare(
        tmp_path, once(tool_call("lookup", city="Oslo")), TOGETHER, environment_factory=lambda: shared
    )
    run(trainer)
    assert busy.most == 1


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_an_engine_that_is_down_masks_its_row_alone(tmp_path: Path, as_coroutine: bool) -> None:
    def search(city: str) -> str:
        if city == "1":
            raise SearchUnavailable("down")
        return city

    async def search_later(city: str) -> str:
        return search(city)

    def script(row: int, turn: int) -> str:
        return DONE if turn else tool_call("lookup", city=str(row))

    tool = named(search_later if as_coroutine else search)
    trainer, seen = prepare(tmp_path, script, TOGETHER, tools=[tool])
    batch, logged = run(trainer)
    assert (batch["turn_ids"] >= 0).any(-1).tolist() == [True, False, True, True]
    assert seen.told(1) == [("lookup", "{'error': 'down'}")]
    assert logged["tools/failure_frequency"] == 0.25
