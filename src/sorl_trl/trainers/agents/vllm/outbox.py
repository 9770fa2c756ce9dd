"""Requests that are sent from threads, and what has come back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Outbox(Generic[Asked, Answer]):
    """Sends from up to `at_once` threads, and holds the answers until they are taken.

    The threads are daemons: one that waits for a server must not keep the process from ending.
    """

    def __init__(self, send: Callable[[Asked], Answer], at_once: int) -> None:
        self._send = send
        self._at_once = at_once
        self._queue: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._unanswered = 0
        self._answers: list[tuple[Asked, Answer]] = []
        self._failure: BaseException | None = None
        self._woken = False
        self._closed = False

    def put(self, asked: Asked) -> None:
        """Have it sent, without waiting."""
        with self._changed:
            self._unanswered += 1
            wants_thread = len(self._threads) < min(self._unanswered, self._at_once)
        self._queue.put(asked)
        if wants_thread:
            thread = threading.Thread(target=self._work, name="sorl-vllm", daemon=True)
            self._threads.append(thread)
            thread.start()

    def take(self) -> list[tuple[Asked, Answer]]:
        """Wait until something has come back, or for `wake`; with nothing underway, do not wait.

        Raises what a request has raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._failure or self._woken or not self._unanswered)
            self._woken = False
            if self._failure is not None:
                raise self._failure
            answers, self._answers = self._answers, []
            return answers

    def wake(self) -> None:
        """Let `take` return: the one that waits, or the next."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Send nothing more; nobody waits for the threads."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while (asked := self._queue.get()) is not None and not self._closed:
            try:
                answer = self._send(asked)
            except BaseException as error:  # whatever it is, `take` raises it
                self._failed(error)
            else:
                self._answered(asked, answer)

    def _answered(self, asked: Asked, answer: Answer) -> None:
        with self._changed:
            self._unanswered -= 1
            self._answers.append((asked, answer))
            self._changed.notify_all()

    def _failed(self, error: BaseException) -> None:
        with self._changed:
            self._unanswered -= 1
            self._failure = self._failure or error
            self._changed.notify_all()
