"""Calls foreign code, which may take long or never return: one thread per row, in order."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

from sorl_trl.threads import Work, start, work_off

THREAD = "sorl-environment"
"""The name of the threads in which environments and searches are called."""
Outcome: TypeAlias = "tuple[Any, BaseException | None]"
Hear: TypeAlias = "Callable[[Any, BaseException | None], Any]"


@dataclass(frozen=True)
class Then:
    """Returned by an awaitable whose row has more to do: `function` is then called in the row's thread."""

    function: Callable[[], Any]


class Calls:
    """The calls of one rollout.

    Each row's calls run in their own thread, because objects may be bound to a thread, as SQLite connections are.
    Awaitables run in an event loop that all rows share. Calls of at most `concurrency` rows run at the same time. A
    call that takes longer than `timeout_s` is abandoned and no longer counts: a coroutine is cancelled, and a thread
    runs until it returns, but its result is ignored. All threads are daemons, so that a hanging call does not keep the
    process from ending.
    """

    def __init__(self, rows: int, timeout_s: float, concurrency: int) -> None:
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._free = threading.Semaphore(concurrency)
        self._open: set[Future[Any]] = set()
        self._rows: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in range(rows)]
        self._loop = asyncio.new_event_loop()
        start(partial(_serve, self._loop), THREAD)
        for waiting in self._rows:
            start(partial(work_off, waiting), THREAD)

    def make(self, row: int, function: Callable[[], Any], late: Any, hear: Hear) -> Future[Any]:
        """Call `function` in the row's thread, without waiting for it.

        The future gets the result of `hear` for its value or its error, or `late` if it takes too long.
        """
        answer: Future[Any] = Future()
        self._open.add(answer)
        answer.add_done_callback(self._open.discard)
        self._rows[row].put(partial(self._call, function, late, hear, answer))
        return answer

    def close(self) -> None:
        """Abandon all calls under way or still to come, without waiting."""
        for answer in list(self._open):
            if answer.cancel():
                answer.set_running_or_notify_cancel()  # tells those who wait for it
        for waiting in self._rows:
            waiting.put(None)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _call(self, function: Callable[[], Any], late: Any, hear: Hear, answer: Future[Any]) -> None:
        self._free.acquire()
        answer.add_done_callback(lambda _: self._free.release())
        if answer.done():
            return
        timer = threading.Timer(self._timeout_s, _settle, (answer, late))
        timer.daemon = True
        timer.start()
        answer.add_done_callback(lambda _: timer.cancel())
        value, error = self._outcome(function, answer)
        if not answer.done():
            try:
                _settle(answer, hear(value, error))
            except BaseException as raised:  # it is raised where the answer is awaited
                _settle(answer, error=raised)

    def _outcome(self, function: Callable[[], Any], answer: Future[Any]) -> Outcome:
        """What the function returns or raises (even KeyboardInterrupt), or the outcome of what follows it."""
        try:
            value = function()
        except BaseException as error:
            return None, error
        if not inspect.isawaitable(value):
            return value, None
        if answer.done():  # it came too late
            if inspect.iscoroutine(value):
                value.close()
            return None, None
        awaited = asyncio.run_coroutine_threadsafe(_contained(value), self._loop)
        answer.add_done_callback(lambda _: awaited.cancel())
        try:
            outcome = awaited.result()
        except BaseException as error:
            return None, error
        return self._outcome(outcome[0].function, answer) if isinstance(outcome[0], Then) else outcome


def _settle(answer: Future[Any], value: Any = None, error: BaseException | None = None) -> None:
    """Set the result or the error, unless the answer was abandoned in the meantime."""
    with suppress(InvalidStateError):
        answer.set_result(value) if error is None else answer.set_exception(error)


async def _contained(awaitable: Any) -> Outcome:
    """Await something, and return its error: a SystemExit that is raised would end the loop that all rows share."""
    try:
        return await awaitable, None
    except BaseException as error:
        return None, error


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, and cancel the tasks that have not ended."""
    loop.run_forever()
    loop.run_until_complete(_cancel_all())
    loop.close()


async def _cancel_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
