"""Threads that do not keep a process from ending, which those of `concurrent.futures` do."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

Work: TypeAlias = "Callable[[], object]"


def start(work: Work, name: str) -> None:
    """Do something in a thread of its own."""
    threading.Thread(target=work, name=name, daemon=True).start()


def work_off(waiting: SimpleQueue[Work | None]) -> None:
    """Do what comes, one after the other, until it is None."""
    while (work := waiting.get()) is not None:
        work()
        del work  # or it would live on while the next is waited for


class DaemonThreads:
    """Threads that call what is submitted, in its order.

    They begin as they are needed, up to `count`, and end with the last reference to this object.
    """

    def __init__(self, count: int, name: str) -> None:
        self._waiting: SimpleQueue[Work | None] = SimpleQueue()
        self._to_start, self._lock, self._name = count, threading.Lock(), name
        weakref.finalize(self, _end, self._waiting, count)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """What `function` returns or raises."""
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:  # whatever it is, who waits for the future raises it
                future.set_exception(error)

        with self._lock:
            if self._to_start:
                self._to_start -= 1
                start(partial(work_off, self._waiting), self._name)
        self._waiting.put(call)
        return future


def _end(waiting: SimpleQueue[Work | None], count: int) -> None:
    for _ in range(count):
        waiting.put(None)
