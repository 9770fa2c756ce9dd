"""Backends for the tests of what goes around one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from sorl_trl.search import SearchBackend
from sorl_trl.types import Passage


def found(query: str, k: int) -> list[Passage]:
    """What `FakeSearch` finds: as many passages as the query has characters, at most `k`."""
    return [Passage(f"{query}-{i}", query.upper(), f"{query} of {k}", 1 / (i + 3)) for i in range(min(k, len(query)))]


class FakeSearch:
    """A deterministic engine that notes its calls and first raises `failures`, one per call."""

    def __init__(self, failures: Sequence[BaseException] = ()) -> None:
        self.failures = list(failures)
        self.calls: list[list[str]] = []

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.calls.append(list(queries))
        if self.failures:
            raise self.failures.pop(0)
        return [found(query, k) for query in queries]


class LosingSearch(FakeSearch):
    """Loses the result of the first query."""

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return super().search_batch(queries, k)[1:]


class Caller(threading.Thread):
    """One search in a thread of its own; `join` it before reading `outcome`: the results, or what was raised."""

    def __init__(self, backend: SearchBackend, queries: Sequence[str], k: int = 3) -> None:
        super().__init__(daemon=True)
        self._backend, self._queries, self._k = backend, queries, k
        self.outcome: list[list[Passage]] | BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._backend.search_batch(self._queries, self._k)
        except BaseException as error:
            self.outcome = error


def outcomes(callers: Sequence[Caller]) -> list[object]:
    """Of all callers, in order; fails the test where one never comes back."""
    for caller in callers:
        caller.join(timeout=20)
        assert not caller.is_alive(), "a caller waits for ever"
    return [caller.outcome for caller in callers]


def wait_until(condition: Callable[[], bool]) -> None:
    """Return as soon as a thread has made it true; fails the test where none ever does."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never becomes true"
        time.sleep(0)
