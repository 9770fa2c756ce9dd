"""Calls of foreign code that may take its time, or never return: each row's in a thread of its own, in order."""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

Function: TypeAlias = "Callable[[Call], Any]"


class Call:
    """One call under way; its future has what comes first: its outcome, or that it is late."""

    def __init__(self, calls: Calls) -> None:
        self.future: Future[Any] = Future()
        self._calls = calls
        self._awaited: Future[tuple[Any, BaseException | None]] | None = None

    def complete(self, outcome: Any) -> Any:
        """`outcome`, or what it gives where it must be awaited: in the one event loop of all rows."""
        if not inspect.isawaitable(outcome):
            return outcome
        self._awaited = self._calls.begin(outcome)
        if self.future.done():  # it is late already
            self._awaited.cancel()
        awaited, error = self._awaited.result()
        if error is not None:
            raise error
        return awaited

    def settle(self, outcome: Any) -> bool:
        """Whether this came first."""
        try:
            self.future.set_result(outcome)
        except InvalidStateError:
            return False
        return True

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):  # it was late: nobody waits for it any more
            self.future.set_exception(error)

    def abandon(self) -> None:
        """Cancel what can be: a coroutine. A thread goes on until it returns, and nobody hears of it."""
        if self.future.cancel():
            self.future.set_running_or_notify_cancel()  # or nobody who waits for it would be told
        if self._awaited is not None:
            self._awaited.cancel()


class Calls:
    """The calls of one rollout.

    A row's calls are made one after the other in a thread that is the row's alone: what it holds may be bound to its
    thread, as an SQLite connection is. At most `concurrency` rows' calls go on at the same time. One that takes longer
    than `timeout_s` is given up and no longer counts; its thread is a daemon.
    """

    def __init__(self, rows: int, timeout_s: float, concurrency: int) -> None:
        self._timeout_s = timeout_s
        self._going_on = threading.Semaphore(concurrency)
        self._rows: list[queue.SimpleQueue[Callable[[], None] | None]] = [queue.SimpleQueue() for _ in range(rows)]
        self._watched: queue.SimpleQueue[tuple[float, Call, Any] | None] = queue.SimpleQueue()
        self._open: set[Call] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        for waiting in self._rows:
            _start(partial(_work, waiting))
        _start(self._watch)

    def make(self, row: int, function: Function, late: Any) -> Future[Any]:
        """Call `function` with the call itself; the outcome is `late` where it takes too long."""
        call = Call(self)
        with self._lock:
            self._open.add(call)
        self._rows[row].put(partial(self._make, call, function, late))
        return call.future

    def begin(self, outcome: Any) -> Future[tuple[Any, BaseException | None]]:
        """Await `outcome` in the event loop, which has a thread of its own. Raises CancelledError once closed."""
        with self._lock:
            if self._is_closed:
                getattr(outcome, "close", lambda: None)()  # a coroutine that never began
                raise CancelledError
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                _start(partial(_run, self._loop))
            return asyncio.run_coroutine_threadsafe(_wait_for(outcome), self._loop)

    def close(self) -> None:
        """Give up all that is under way or still to come. Nothing is waited for."""
        with self._lock:
            self._is_closed = True
            abandoned, self._open = self._open, set()
        for call in abandoned:
            call.abandon()
        for waiting in self._rows:
            waiting.put(None)
            self._going_on.release()  # for a thread that waits to begin, and finds that it is too late
        self._watched.put(None)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _make(self, call: Call, function: Function, late: Any) -> None:
        self._going_on.acquire()
        if self._is_closed:
            return
        self._watched.put((time.monotonic() + self._timeout_s, call, late))
        try:
            outcome = function(call)
        except BaseException as error:  # whatever it is, it is raised where the outcome is waited for
            self._end(call)
            call.fail(error)
        else:
            self._end(call)
            call.settle(outcome)

    def _watch(self) -> None:
        """All calls have as long: who began first is late first."""
        while (watched := self._watched.get()) is not None:
            deadline, call, late = watched
            if not math.isinf(deadline):
                wait([call.future], timeout=min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX))
                if call.settle(late):
                    self._end(call)
                    call.abandon()

    def _end(self, call: Call) -> None:
        """Let another one begin: once per call, whether it ends or is late first."""
        with self._lock:
            if call not in self._open:
                return
            self._open.remove(call)
        self._going_on.release()


def _start(work: Callable[[], None]) -> None:
    # A daemon: an environment that hangs must not keep the process from ending.
    threading.Thread(target=work, name="sorl-environment", daemon=True).start()


def _work(waiting: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := waiting.get()) is not None:
        work()


async def _wait_for(outcome: Any) -> tuple[Any, BaseException | None]:
    """What it gives, and what it raised where that would end the loop, on which other rows go on."""
    try:
        return await outcome, None
    except (SystemExit, KeyboardInterrupt) as error:
        return None, error


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Until it is stopped; what has not ended then is cancelled."""
    loop.run_forever()
    loop.run_until_complete(_cancel_all())
    loop.close()


async def _cancel_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
