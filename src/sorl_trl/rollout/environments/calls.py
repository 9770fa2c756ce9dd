"""Calls of foreign code that may take its time, or never return: each row's in a thread of its own, in order."""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

Outcome: TypeAlias = "tuple[Any, BaseException | None]"
Hear: TypeAlias = "Callable[[Any, BaseException | None], Any]"


class Calls:
    """The calls of one rollout.

    What is done for a row is done in a thread that is the row's alone: what it holds may be bound to its thread, as an
    SQLite connection is. What must be awaited is awaited in an event loop that all rows share. At most `concurrency`
    rows' calls go on at the same time. One that takes longer than `timeout_s` is given up and no longer counts: a
    coroutine is cancelled, and a thread goes on until it returns, but nobody hears of it. All threads are daemons, so
    that a call that hangs does not keep the process from ending.
    """

    def __init__(self, rows: int, timeout_s: float, concurrency: int) -> None:
        self._timeout_s = None if math.isinf(timeout_s) else timeout_s
        self._free, self._in_order = asyncio.Semaphore(concurrency), [asyncio.Lock() for _ in range(rows)]
        self._open: set[Future[Any]] = set()
        self._rows: list[queue.SimpleQueue[Callable[[], None] | None]] = [queue.SimpleQueue() for _ in range(rows)]
        # Two loops: a coroutine that blocks holds up the others, but no time limit.
        self._loop, self._coroutines = asyncio.new_event_loop(), asyncio.new_event_loop()
        _start(partial(_serve, self._loop, then=self._coroutines))
        _start(partial(_serve, self._coroutines))
        for waiting in self._rows:
            _start(partial(_work, waiting))

    def make(self, row: int, function: Callable[[], Any], late: Any, hear: Hear) -> Future[Any]:
        """Call `function` in the row's thread, without waiting for it.

        The future has what `hear` makes of its value, or of what it raised; or `late` where it takes too long.
        """
        answer: Future[Any] = Future()
        self._open.add(answer)
        answer.add_done_callback(self._open.discard)
        asyncio.run_coroutine_threadsafe(self._call(row, function, late, hear, answer), self._loop)
        return answer

    def close(self) -> None:
        """Give up all that is under way or still to come. Nothing is waited for."""
        for answer in list(self._open):
            if answer.cancel():
                answer.set_running_or_notify_cancel()  # or nobody who waits for it would be told
        for waiting in self._rows:
            waiting.put(None)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _call(self, row: int, function: Callable[[], Any], late: Any, hear: Hear, answer: Future[Any]) -> None:
        async with self._in_order[row], self._free:
            task = asyncio.ensure_future(self._outcome(row, function))
            done, _ = await asyncio.wait([task], timeout=self._timeout_s)
            task.cancel()
        value: Any = late
        error: BaseException | None = None
        if done:
            try:
                value = hear(*task.result())
            except BaseException as raised:  # whatever it is, it is raised where the answer is waited for
                error = raised
        with suppress(InvalidStateError):  # all was given up meanwhile
            answer.set_result(value) if error is None else answer.set_exception(error)

    async def _outcome(self, row: int, function: Callable[[], Any]) -> Outcome:
        called: Future[Outcome] = Future()
        self._rows[row].put(partial(_run, function, called))
        try:
            value, error = await asyncio.wrap_future(called)
        except asyncio.CancelledError:
            called.add_done_callback(_dispose)
            raise
        if error is None and inspect.isawaitable(value):
            awaited = asyncio.run_coroutine_threadsafe(_contained(value), self._coroutines)
            value, error = await asyncio.wrap_future(awaited)
        return value, error


def _start(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="sorl-environment", daemon=True).start()


def _work(waiting: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := waiting.get()) is not None:
        work()


def _run(function: Callable[[], Any], called: Future[Outcome]) -> None:
    """What the function returns or raises, KeyboardInterrupt too; nothing, if it is late before it begins."""
    if not called.set_running_or_notify_cancel():
        return
    outcome: Outcome
    try:
        outcome = function(), None
    except BaseException as error:
        outcome = None, error
    called.set_result(outcome)


def _dispose(called: Future[Outcome]) -> None:
    """A coroutine that came too late would warn that nobody awaited it."""
    value = None if called.cancelled() else called.result()[0]
    if inspect.iscoroutine(value):
        value.close()


async def _contained(awaitable: Any) -> Outcome:
    """The same of what must be awaited: an exception such as SystemExit would end the loop, on which others go on."""
    try:
        return await awaitable, None
    except BaseException as error:
        return None, error


def _serve(loop: asyncio.AbstractEventLoop, then: asyncio.AbstractEventLoop | None = None) -> None:
    """Run a loop until it is stopped, cancel what has not ended, and stop the loop that it had work done in."""
    loop.run_forever()
    loop.run_until_complete(_cancel_all())
    loop.close()
    if then is not None:
        then.call_soon_threadsafe(then.stop)


async def _cancel_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
