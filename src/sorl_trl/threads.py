"""Threads that do not keep a process from ending, unlike those of `concurrent.futures`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import cache, partial, wraps
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

_Made = TypeVar("_Made")
_Work: TypeAlias = "Callable[[], object]"


def made_once(make: Callable[..., _Made]) -> Callable[..., _Made]:
    """`functools.cache` for what threads share: those that call at the same time get the same object, too."""
    lock, cached = threading.Lock(), cache(make)

    @wraps(make)
    def made(*args: Hashable) -> _Made:
        with lock:
            return cached(*args)

    return made


def start(work: _Work, name: str) -> None:
    """Run `work` in a new thread."""
    threading.Thread(target=work, name=name, daemon=True).start()


def _work_off(waiting: SimpleQueue[_Work | None]) -> None:
    """Run the queue's items one by one, until None."""
    while (work := waiting.get()) is not None:
        work()
        del work  # or it would stay alive while the thread waits for the next


class DaemonThreads:
    """Threads that run what is submitted, in order.

    They start as needed, up to `count` of them, and end with the last reference to this object.
    """

    def __init__(self, count: int, name: str) -> None:
        self._waiting: SimpleQueue[_Work | None] = SimpleQueue()
        self._to_start, self._lock, self._name = count, threading.Lock(), name
        weakref.finalize(self, _end, self._waiting, count)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call `function` in a thread. The future holds what it returns or raises."""
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:  # whatever it is, it is raised where the future is awaited
                future.set_exception(error)

        with self._lock:
            if self._to_start:
                self._to_start -= 1
                start(partial(_work_off, self._waiting), self._name)
        self._waiting.put(call)
        return future


def _end(waiting: SimpleQueue[_Work | None], count: int) -> None:
    for _ in range(count):
        waiting.put(None)
