from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from functools import partial
from typing import Any, ClassVar

import pytest

from sorl_trl.rollout.environment import Reply
from sorl_trl.rollout.responder import EnvironmentResponder
from sorl_trl.search import SearchUnavailable
from sorl_trl.types import Action, ActionKind, StopReason, Turn

LONG = 60.0
ENOUGH = 1.0
"""For a step that does nothing, however busy the machine; and to be waited for where another one hangs."""


def turn(content: str = "", tool: str = "act") -> Turn:
    return Turn((1,), "", Action(ActionKind.TOOL, content, tool))


@pytest.fixture
def opened() -> Iterator[Callable[..., EnvironmentResponder]]:
    """Opens a responder of some environments, with an example each."""
    responders = []

    def open_one(factory: Any, *examples: dict[str, Any], **options: Any) -> EnvironmentResponder:
        responders.append(EnvironmentResponder(factory, **{"timeout_s": LONG, **options}))
        responders[-1].open(examples or ({},))
        return responders[-1]

    yield open_one
    for responder in responders:
        responder.close()


def ask(responder: EnvironmentResponder, *contents: str) -> list[Any]:
    """What comes of a turn of each of the first rows."""
    futures = responder.ask({row: turn(content) for row, content in enumerate(contents)})
    return [future.exception(LONG) or future.result() for future in futures.values()]


class Counter:
    """Counts its own steps; slots, so that nothing can be hung onto it."""

    __slots__ = ("count", "thread")

    def __init__(self) -> None:
        self.count, self.thread = 0, threading.get_ident()

    def step(self, taken: Turn) -> Reply:
        assert threading.get_ident() == self.thread, "what is bound to a thread could not be used"
        self.count += 1
        return Reply(f"{taken.action.content} {self.count}", reward=float(self.count))


class SlowlyCounting(Counter):
    async def step(self, taken: Turn) -> Reply:  # type: ignore[override]
        self.count += 1
        await asyncio.sleep(0)
        return Reply(f"{taken.action.content} {self.count}", reward=float(self.count))


@pytest.mark.parametrize("environment", [Counter, SlowlyCounting])
def test_each_row_has_an_environment_of_its_own_and_its_steps_are_in_order(opened: Any, environment: Any) -> None:
    responder = opened(environment, {}, {})
    futures = [responder.ask(dict.fromkeys((0, 1), turn(content))) for content in "abc"]
    replies = [each[row].result(LONG) for each in futures for row in (0, 1)]
    assert [reply.text for reply in replies] == ["a 1", "a 1", "b 2", "b 2", "c 3", "c 3"]
    assert [reply.reward for reply in replies] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    responder.open([{}])
    assert ask(responder, "anew") == [Reply("anew 1", reward=1.0)]


def test_no_more_go_on_at_the_same_time_than_may(opened: Any) -> None:
    together, most, lock, pairs = 0, 0, threading.Lock(), threading.Barrier(2)

    class Watched:
        def step(self, taken: Turn) -> Reply:
            nonlocal together, most
            with lock:
                together += 1
                most = max(most, together)
            pairs.wait(60)
            with lock:
                together -= 1
            return Reply()

    assert ask(opened(Watched, *[{}] * 6, concurrency=2), *"abcdef") == [Reply()] * 6
    assert most == 2


class Hangs:
    """Until it is let go, where the turn asks for it."""

    def __init__(self, go: threading.Event) -> None:
        self.go = go

    def step(self, taken: Turn) -> Reply:
        if taken.action.content == "hang":
            self.go.wait()
        return Reply("here")


class AsyncHangs:
    cancelled: ClassVar[list[bool]] = []

    async def step(self, taken: Turn) -> Reply:
        try:
            await asyncio.sleep(LONG if taken.action.content == "hang" else 0)
        except asyncio.CancelledError:
            self.cancelled.append(True)
            raise
        return Reply("here")


class BlocksTheLoop(Hangs):
    """The mistake that an asynchronous environment makes most."""

    async def step(self, taken: Turn) -> Reply:  # type: ignore[override]
        return super().step(taken)


DOWN = Reply(stop=StopReason.ENVIRONMENT_UNAVAILABLE)


def test_a_step_that_takes_too_long_is_given_up_and_holds_nobody_else_up(opened: Any) -> None:
    go = threading.Event()
    responder = opened(partial(Hangs, go), {}, {}, timeout_s=ENOUGH, concurrency=1)
    assert ask(responder, "hang", "fine") == [DOWN, Reply("here")]
    go.set()


def test_a_coroutine_that_takes_too_long_is_cancelled(opened: Any) -> None:
    responder = opened(AsyncHangs, {}, {}, timeout_s=ENOUGH)
    assert ask(responder, "hang", "fine") == [DOWN, Reply("here")]
    for _ in range(10_000):
        if AsyncHangs.cancelled:
            break
        threading.Event().wait(0.001)
    assert AsyncHangs.cancelled, "at once, not with the rollout"


def test_a_blocked_event_loop_hangs_no_rollout(opened: Any) -> None:
    go = threading.Event()
    responder = opened(partial(BlocksTheLoop, go), {}, {}, timeout_s=ENOUGH)
    assert ask(responder, "hang", "hang") == [DOWN, DOWN]
    responder.open([{}])  # with a loop of its own
    assert ask(responder, "fine") == [Reply("here")]
    go.set()


def test_closing_waits_for_nothing_and_the_next_rollout_is_left_alone(opened: Any) -> None:
    go = threading.Event()
    responder = opened(partial(Hangs, go), {})
    hanging, waiting = (responder.ask({0: turn(content)})[0] for content in ("hang", "next"))
    responder.close()
    assert hanging.cancelled() and waiting.cancelled()
    assert not wait([hanging, waiting], timeout=0).not_done, "whoever waits for them is told"
    responder.open([{}, {}])
    assert ask(responder, "a", "b") == [Reply("here")] * 2
    go.set()
    with pytest.raises(CancelledError):
        hanging.result()


def test_threads_end_with_the_rollout(opened: Any) -> None:
    def environment_threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "sorl-environment"}

    before = environment_threads()
    responder = opened(SlowlyCounting, *[{}] * 3)
    ask(responder, *"abc")
    during = environment_threads() - before
    assert len(during) == 4, "one per row, one for coroutines"
    responder.close()
    for thread in during:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in during)


class Raises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def step(self, taken: Turn) -> Reply:
        raise self.error


class AsyncRaises(Raises):
    async def step(self, taken: Turn) -> Reply:  # type: ignore[override]
        raise self.error


@pytest.mark.parametrize("environment", [Raises, AsyncRaises])
def test_a_world_that_is_down_masks_its_trajectory(opened: Any, environment: Any, caplog: Any) -> None:
    error = SearchUnavailable("down")
    with caplog.at_level(logging.WARNING):
        assert ask(opened(partial(environment, error)), "a") == [DOWN]
    assert environment.__name__ in caplog.text and repr(error) in caplog.text


@pytest.mark.parametrize(
    ("environment", "error"),
    [(Raises, KeyError("bug")), (AsyncRaises, KeyError("bug")), (Raises, KeyboardInterrupt())],
)
def test_other_errors_are_raised_where_the_reply_is_waited_for(opened: Any, environment: Any, error: Any) -> None:
    assert ask(opened(partial(environment, error)), "a") == [error]


@pytest.mark.parametrize("environment", [Raises, AsyncRaises])
def test_one_that_would_end_the_process_without_a_word_is_told(opened: Any, environment: Any) -> None:
    (error,) = ask(opened(partial(environment, SystemExit())), "a")
    assert isinstance(error, RuntimeError) and "SystemExit" in str(error)


@pytest.mark.parametrize("arguments", [{"text": 7}, {"text": None}, {"reward": "1"}, {"reward": float("nan")}])
def test_a_reply_of_another_kind_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(arguments))):
        Reply(**arguments)


class Returns:
    """Its row's text, from `reset` and from `step`; errors are raised."""

    def reset(self, at_first: Any = None, later: Any = None) -> Any:
        self.later = later
        if isinstance(at_first, BaseException):
            raise at_first
        return at_first

    def step(self, taken: Turn) -> Any:
        return self.later


@pytest.mark.parametrize("value", [None, "text", {"text": "a"}, ("a", 1.0)])
def test_what_is_no_reply_is_named(opened: Any, value: Any) -> None:
    (error,) = ask(opened(Returns, {"later": value}), "a")
    assert isinstance(error, TypeError)
    assert str(error).startswith(f"Returns.step returned a {type(value).__name__}, but must return a `Reply`")


def test_a_reset_of_a_world_that_is_down_masks_one_trajectory(opened: Any) -> None:
    here = Reply("here")
    responder = opened(Returns, {"at_first": ConnectionError("refused"), "later": here}, {"later": here})
    assert ask(responder, "a", "b") == [DOWN, here]
    with pytest.raises(TypeError, match=r"Returns\.reset returned a list"):
        responder.open([{"at_first": [{"type": "text", "text": "a"}]}])


class Game:
    def reset(self, number: int, hint: str = "none", **_: Any) -> str:
        self.number, self.hint = number, hint
        return f"to {number}, {hint}"

    def step(self, taken: Turn) -> Reply:
        return Reply(f"{self.number} {self.hint}")


class Picky:
    """Takes one column, and returns nothing."""

    async def reset(self, number: int) -> None:
        self.number = number

    def step(self, taken: Turn) -> Reply:
        return Reply(str(self.number))


def test_a_reset_gets_the_columns_that_it_takes(opened: Any) -> None:
    examples = [{"number": 3, "other": 1, "prompt": "?"}, {"number": 4, "hint": "low", "prompt": "?"}]
    assert ask(opened(Picky, *examples), "a", "b") == [Reply("3"), Reply("4")]
    responder = EnvironmentResponder(Game)
    assert [row.greeting for row in responder.open(examples)] == ["to 3, none", "to 4, low"]
    assert ask(responder, "a", "b") == [Reply("3 none"), Reply("4 low")]
    assert [game.number for game in responder.environments] == [3, 4]
    responder.close()
    assert [game.number for game in responder.environments] == [3, 4], "reward functions read them"
