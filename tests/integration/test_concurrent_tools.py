"""TRL's tool loop with tools of several trajectories at the same time, and with a limit of time."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sorl_trl.search import SearchUnavailable
from sorl_trl.trainers.agents import tool_answers
from sorl_trl.trainers.agents.tool_calls import HangingCalls
from tests.tools import Atlas, build, following, lookup, numbered_rows, qwen_tokenizer, tool_call

TOGETHER = {"tool_concurrency": 4}
DONE = "Done."
PATIENCE_S = 20.0
"""Longer than any test that passes waits."""


def named(function: Any, name: str = "lookup") -> Any:
    function.__name__, function.__doc__ = name, lookup.__doc__
    function.__annotations__ = lookup.__annotations__
    return function


class Seen:
    """A reward function that keeps the messages it is given."""

    __name__ = "seen"

    def __init__(self) -> None:
        self.completions: list[list[dict[str, Any]]] = []

    def __call__(self, completions: Any, **_: Any) -> list[float]:
        self.completions = completions
        return [float(len(str(completion))) for completion in completions]

    def told(self, row: int) -> list[tuple[str, Any]]:
        return [(each["name"], each["content"]) for each in self.completions[row] if each["role"] == "tool"]


def prepare(
    folder: Path, script: Callable[[int, int], str], options: dict[str, Any], **native: Any
) -> tuple[Any, Seen]:
    seen = Seen()
    tokenizer = qwen_tokenizer()
    trainer = build(folder, tokenizer, seen, {"max_completion_length": 4096, **options}, **native)
    trainer.model.config.max_position_embeddings = 8192  # TRL drops results that do not fit
    trainer._generate_single_turn = following(tokenizer, script)
    return trainer, seen


def run(trainer: Any, rows: int = 4) -> tuple[dict[str, Any], dict[str, float]]:
    batch = trainer._generate_and_score_completions(numbered_rows(rows))
    return batch, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def once(*calls: str) -> Callable[[int, int], str]:
    """Every row makes these calls in its first message, and none after it."""
    return lambda row, turn: DONE if turn else "\n".join(calls)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What hangs in a test until its end."""
    event = threading.Event()
    yield event
    event.set()


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


def own_row(row: int, turn: int) -> str:
    return DONE if turn else tool_call("lookup", city=str(row))


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
    with pytest.raises(KeyboardInterrupt):
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
