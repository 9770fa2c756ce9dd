"""TRL's tool loop with tools that hang, that end the run, or that nobody waits for."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sorl_trl.trainers.agents import tool_answers
from sorl_trl.trainers.agents.tool_calls import HangingCalls
from tests.engines import ctrl_c_is_heard
from tests.tool_runs import DONE, PATIENCE_S, TOGETHER, named, own_row, prepare, run
from tests.tools import Atlas, lookup, tool_call


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What hangs in a test until its end."""
    event = threading.Event()
    yield event
    event.set()


# ---------------------------------------------------------------------------------------------------------------------
# A limit of time
# ---------------------------------------------------------------------------------------------------------------------

LATE = "{'error': 'Tool lookup timed out after 0.05 seconds.'}"
BUSY = "{'error': 'Tool lookup was not called: an earlier call, which timed out, is still running.'}"


def hanging(released: threading.Event, kind: str) -> Any:
    def wait(city: str) -> str:
        if city == "0":
            released.wait(PATIENCE_S)
        return city

    async def wait_later(city: str) -> str:
        while city == "0" and not released.is_set():
            await asyncio.sleep(0.01)
        return city

    async def block(city: str) -> str:
        return wait(city)  # as a blocking request does: nothing else in the event loop goes on

    return named({"function": wait, "coroutine": wait_later, "blocking coroutine": block}[kind])


@pytest.mark.parametrize("kind", ["function", "coroutine"])
@pytest.mark.parametrize("tool_concurrency", [1, 4])
def test_a_tool_that_hangs_is_a_message(
    tmp_path: Path, released: threading.Event, kind: str, tool_concurrency: int
) -> None:
    options = {"tool_concurrency": tool_concurrency, "tool_timeout_s": 0.05}
    tool = hanging(released, kind)
    trainer, seen = prepare(tmp_path, own_row, options, tools=[tool])
    _, logged = run(trainer)
    refused = BUSY if tool_concurrency == 1 and kind == "function" else None  # with 1, nothing runs beside it
    assert seen.told(0) == [("lookup", LATE)]
    for row in range(1, 4):
        assert seen.told(row) == [("lookup", refused or str(row))]
    assert logged["tools/timeout_frequency"] == logged["tools/failure_frequency"] == (1.0 if refused else 0.25)
    assert logged["tools/call_frequency"] == 1.0


def test_a_coroutine_that_blocks_the_event_loop_is_given_up_too(tmp_path: Path, released: threading.Event) -> None:
    options = {"tool_concurrency": 4, "tool_timeout_s": 0.05}
    tool = hanging(released, "blocking coroutine")
    trainer, seen = prepare(tmp_path, lambda row, turn: own_row(row, turn // 2), options, tools=[tool])
    run(trainer)
    assert seen.told(0) == [("lookup", LATE)] * 2


def test_an_environment_that_hangs_is_left_alone_until_it_has_ended(tmp_path: Path, released: threading.Event) -> None:
    made = []

    class Slow(Atlas):
        def __init__(self) -> None:
            self.resets = 0
            made.append(self)

        def reset(self, **row: Any) -> None:
            self.resets += 1

        def lookup(self, city: str) -> str:
            if city == "0":
                released.wait(PATIENCE_S)
            return f"{city} {threading.active_count() > 0}"

    Slow.lookup.__doc__ = lookup.__doc__

    def script(row: int, turn: int) -> str:
        return DONE if turn else "\n".join([tool_call("lookup", city=str(row))] * 2)

    options = {"tool_concurrency": 4, "tool_timeout_s": 0.05}
    trainer, seen = prepare(tmp_path, script, options, environment_factory=Slow)
    _, logged = run(trainer)
    assert seen.told(0) == [("lookup", LATE), ("lookup", BUSY)]
    assert seen.told(1) == [("lookup", "1 True")] * 2
    assert logged["tools/timeout_frequency"] == 0.25
    assert len(made) == 4
    run(trainer)
    assert len(made) == 5, "a new one in the place of the one that hangs"
    assert [each.resets for each in made] == [1, 2, 2, 2, 1]


def test_one_that_has_ended_may_be_called_again(tmp_path: Path, released: threading.Event) -> None:
    ended = threading.Event()

    class Slow(Atlas):
        def lookup(self, city: str) -> str:
            if city == "0":
                released.wait(PATIENCE_S)
                ended.set()
            return city

    Slow.lookup.__doc__ = lookup.__doc__

    def script(row: int, turn: int) -> str:
        if turn == 1:
            released.set()
            ended.wait(PATIENCE_S)
            time.sleep(0.02)  # its thread has a line to go
        return tool_call("lookup", city=str(row + turn)) if turn < 2 else DONE

    options = {"tool_concurrency": 4, "tool_timeout_s": 0.05}
    trainer, seen = prepare(tmp_path, script, options, environment_factory=Slow)
    run(trainer)
    assert seen.told(0) == [("lookup", LATE), ("lookup", "1")]


# ---------------------------------------------------------------------------------------------------------------------
# What must not get through, and what must
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("as_coroutine", [False, True])
def test_an_interruption_ends_the_run(tmp_path: Path, error: Any, as_coroutine: bool) -> None:
    called = []

    def interrupt(city: str) -> str:
        called.append(city)
        raise error("enough")

    async def interrupt_later(city: str) -> str:
        return interrupt(city)

    tool = named(interrupt_later if as_coroutine else interrupt)
    options = {"tool_timeout_s": PATIENCE_S}
    trainer, seen = prepare(tmp_path, own_row, options, tools=[tool])
    with pytest.raises(error, match="enough"):
        run(trainer)
    assert called == ["0"], "no call after it"
    assert not seen.completions
    assert trainer._tools._answers is None


@pytest.mark.parametrize("limit", [{"max_completion_length": 300}, {"max_tool_calling_iterations": 1}])
def test_no_placeholder_gets_out(tmp_path: Path, limit: dict[str, int]) -> None:
    """Not where TRL drops a result that is too long, nor where it calls no more tools."""

    def script(row: int, turn: int) -> str:
        return tool_call("lookup", city=str(row))

    tool = named(lambda city: city * (200 if city == "0" else 1))
    trainer, seen = prepare(tmp_path, script, {**TOGETHER, **limit}, tools=[tool])
    run(trainer)
    roles = [[message["role"] for message in completion] for completion in seen.completions]
    if "max_completion_length" in limit:
        assert roles[0] == ["assistant"]
    assert roles[1][:3] == ["assistant", "tool", "assistant"]
    assert seen.told(1)[0] == ("lookup", "1")
    texts = [message["content"] for completion in seen.completions for message in completion if "name" in message]
    assert texts and all(type(text) is str and text for text in texts)


def test_a_loop_that_asks_for_no_answer_is_an_error(tmp_path: Path) -> None:
    trainer, _ = prepare(tmp_path, own_row, TOGETHER, tools=[named(lambda city: city), named(_never, "never")])
    run(trainer)

    def loop(prompts: Any) -> tuple[Any, ...]:
        trainer._sync_tool_dicts[0]["lookup"](city="Oslo")
        trainer._sync_tool_dicts[0]["never"](city="Oslo")
        return (None,) * 7

    with pytest.raises(RuntimeError, match="2 calls of tools were never answered"):
        trainer._tools.run_loop(loop, [None] * 4)


async def _never(city: str) -> str:
    return city


def test_ctrl_c_does_not_wait_for_tools(tmp_path: Path, released: threading.Event) -> None:
    def press(city: str) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return str(released.wait(PATIENCE_S))

    trainer, _ = prepare(tmp_path, own_row, TOGETHER, tools=[named(press)])
    with ctrl_c_is_heard(), pytest.raises(KeyboardInterrupt):
        run(trainer)
    assert not released.is_set() and any(each.name == "sorl-tool" for each in threading.enumerate())


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_waiting_for_tools_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, as_coroutine: bool
) -> None:
    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock, tool_seconds = Clock(), [1.0]
    monkeypatch.setattr(tool_answers, "time", clock)

    def tool(city: str) -> str:
        clock.now += tool_seconds[-1]
        return city

    async def tool_later(city: str) -> str:
        return tool(city)

    trainer, _ = prepare(tmp_path, own_row, {}, tools=[named(tool_later if as_coroutine else tool)])
    with caplog.at_level(logging.WARNING, logger="sorl_trl"):
        run(trainer)
        assert not caplog.records
        tool_seconds.append(2.0)
        run(trainer)
        run(trainer)
    (record,) = caplog.records
    assert "8 of 8 seconds of a tool loop went into tools" in record.message


def test_images_are_looked_for_where_trl_looks_for_them() -> None:
    """As the tool is called: what a vision model's tools say cannot come later."""
    args = SimpleNamespace(tool_concurrency=4, tool_timeout_s=1.0)
    trainer = SimpleNamespace(_is_vlm=True, args=args, environments=None)
    assert isinstance(tool_answers.tool_answers(trainer, HangingCalls()), tool_answers.SerialAnswers)
