from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence

import pytest
from tests.unit.search.backends import Caller, FakeSearch, found, outcomes, wait_until

from sorl_trl.search import SearchError, SearchUnavailable
from sorl_trl.search.around.breaker import CircuitBreaker, CircuitOpen
from sorl_trl.types import Passage

DOWN = SearchUnavailable("down")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def fail(search: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(SearchUnavailable, match=r"^down$"):
            search.search_batch(["a"], 3)


def opened(backend: FakeSearch, clock: Clock) -> CircuitBreaker:
    """A breaker that two failures have just opened."""
    backend.failures[:0] = [DOWN, DOWN]
    search = CircuitBreaker(backend, failures=2, recovery_s=30, clock=clock)
    fail(search, 2)
    return search


def test_it_opens_after_that_many_failures_in_a_row() -> None:
    backend, clock = FakeSearch([DOWN] * 9), Clock()
    search = CircuitBreaker(backend, failures=3, recovery_s=30, clock=clock)
    fail(search, 3)
    clock.now += 12
    with pytest.raises(
        CircuitOpen, match=r"failed 3 times in a row .* left alone for 12\.0 s; .* for another 18\.0 s"
    ):
        search.search_batch(["a"], 3)
    assert len(backend.calls) == 3
    assert (search.opened, search.rejected) == (1, 1)


@pytest.mark.parametrize("error", [ConnectionRefusedError(), TimeoutError()])
def test_a_lost_connection_is_a_failure(error: Exception) -> None:
    search = CircuitBreaker(FakeSearch([error, error]), failures=2)
    for _ in range(2):
        with pytest.raises(type(error)):
            search.search_batch(["a"], 3)
    with pytest.raises(CircuitOpen):
        search.search_batch(["a"], 3)


def test_an_answer_in_between_starts_the_count_again() -> None:
    backend = FakeSearch([DOWN, DOWN])
    search = CircuitBreaker(backend, failures=3)
    fail(search, 2)
    assert search.search_batch(["a"], 3) == [found("a", 3)]
    backend.failures = [DOWN, DOWN]
    fail(search, 2)
    assert search.search_batch(["a"], 3) == [found("a", 3)]
    assert search.opened == 0


def test_a_refusal_is_a_sign_of_life() -> None:
    search = CircuitBreaker(FakeSearch([DOWN, SearchError("no"), DOWN, *[SearchError("no")] * 9]), failures=2)
    fail(search)
    with pytest.raises(SearchError):
        search.search_batch(["a"], 3)
    fail(search)
    for _ in range(9):
        with pytest.raises(SearchError):
            search.search_batch(["a"], 3)
    assert search.opened == 0


def test_a_programming_error_says_nothing_of_the_engine() -> None:
    search = CircuitBreaker(FakeSearch([DOWN, KeyError("bug"), DOWN]), failures=2)
    fail(search)
    with pytest.raises(KeyError):
        search.search_batch(["a"], 3)
    fail(search)
    assert search.opened == 1


@pytest.mark.parametrize("error", [None, SearchError("refused")])
def test_a_probe_that_is_answered_closes_it(error: Exception | None) -> None:
    backend, clock = FakeSearch(), Clock()
    search = opened(backend, clock)
    clock.now += 30
    if error is None:
        assert search.search_batch(["a"], 3) == [found("a", 3)]
    else:
        backend.failures = [error]
        with pytest.raises(SearchError):
            search.search_batch(["a"], 3)
    backend.failures = [DOWN]
    fail(search)  # One of two: it is closed, and counts from zero.
    assert search.search_batch(["a"], 3) == [found("a", 3)]


def test_a_probe_that_fails_opens_it_again() -> None:
    backend, clock = FakeSearch(), Clock()
    search = opened(backend, clock)
    backend.failures = [DOWN]
    clock.now += 30
    fail(search)
    clock.now += 29
    with pytest.raises(CircuitOpen, match="failed 3 times in a row"):
        search.search_batch(["a"], 3)
    clock.now += 1
    assert search.search_batch(["a"], 3) == [found("a", 3)]
    assert search.opened == 2


def test_a_probe_that_crashes_leaves_the_way_to_the_next() -> None:
    backend, clock = FakeSearch(), Clock()
    search = opened(backend, clock)
    backend.failures = [KeyboardInterrupt()]
    clock.now += 30
    with pytest.raises(KeyboardInterrupt):
        search.search_batch(["a"], 3)
    assert search.search_batch(["a"], 3) == [found("a", 3)]


class GatedSearch(FakeSearch):
    """Every call waits for `gate`, once it has said so through `entered`."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate = threading.Semaphore(0), threading.Event()
        self.gate.set()

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        failure = self.failures.pop(0) if self.failures else None
        self.entered.release()
        assert self.gate.wait(20)
        if failure:
            raise failure
        return super().search_batch(queries, k)


def test_one_probe_at_a_time() -> None:
    backend, clock = GatedSearch(), Clock()
    search = opened(backend, clock)
    clock.now += 30
    backend.gate.clear()
    probe = Caller(search, ["probe"])
    wait_until(lambda: search._probing)
    with pytest.raises(CircuitOpen, match="until the probe under way succeeds"):
        search.search_batch(["other"], 3)
    backend.gate.set()
    assert outcomes([probe]) == [[found("probe", 3)]]
    assert search.search_batch(["other"], 3) == [found("other", 3)]


@pytest.mark.parametrize("late", [None, DOWN])
def test_a_search_from_before_it_opened_changes_nothing(late: SearchUnavailable | None) -> None:
    backend, clock = GatedSearch(), Clock()
    search = CircuitBreaker(backend, failures=2, recovery_s=30, clock=clock)
    backend.gate.clear()
    backend.failures = [late] if late else []
    straggler = Caller(search, ["late"])
    assert backend.entered.acquire(timeout=20)
    gate, backend.gate = backend.gate, threading.Event()
    backend.gate.set()
    backend.failures = [DOWN, DOWN]
    fail(search, 2)
    clock.now += 10
    gate.set()
    assert outcomes([straggler]) == [late or [found("late", 3)]]
    with pytest.raises(CircuitOpen, match=r"failed 2 times .* for 10\.0 s; .* another 20\.0 s"):
        search.search_batch(["a"], 3)
    assert search.opened == 1


def test_searches_of_threads_overlap() -> None:
    """No lock is held while the backend is asked."""
    meeting = threading.Barrier(4, timeout=20)

    class MeetingSearch(FakeSearch):
        def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            meeting.wait()
            return super().search_batch(queries, k)

    search = CircuitBreaker(MeetingSearch())
    assert outcomes([Caller(search, [query]) for query in "abcd"]) == [[found(query, 3)] for query in "abcd"]


@pytest.mark.parametrize(("argument", "value"), [("failures", 0), ("recovery_s", -1)])
def test_an_argument_out_of_range_is_named(argument: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"`{argument}` is {value}, but must be .*at least"):
        CircuitBreaker(FakeSearch(), **{argument: value})


def test_a_copy_starts_closed() -> None:
    search = CircuitBreaker(FakeSearch([DOWN]), failures=1)
    fail(search)
    copy = pickle.loads(pickle.dumps(search))
    assert copy.search_batch(["a"], 3) == [found("a", 3)]
