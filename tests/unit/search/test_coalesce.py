"""Threads are held at barriers and events; none of these tests waits for time to pass."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence

import pytest
from tests.unit.search.backends import Caller, FakeSearch, LosingSearch, found, outcomes, wait_until

from sorl_trl.search import SearchError, SearchUnavailable
from sorl_trl.search.around.coalesce import CoalescingSearch
from sorl_trl.types import Passage


class Window:
    """A window that stays open until `close`; once closed it does not open again."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def __call__(self, _seconds: float) -> None:
        assert self._closed.wait(20)

    def close(self) -> None:
        self._closed.set()


def gather(search: CoalescingSearch, requests: Sequence[tuple[Sequence[str], int]]) -> list[Caller]:
    """One thread per request, all of them inside the window."""
    callers = [Caller(search, queries, k) for queries, k in requests]
    wait_until_asked(search, sum(len(queries) for queries, _ in requests))
    return callers


def wait_until_asked(search: CoalescingSearch, queries: int) -> None:
    wait_until(lambda: search.asked >= queries)


def test_callers_at_the_same_time_share_one_call() -> None:
    backend, window = FakeSearch(), Window()
    search = CoalescingSearch(backend, sleep=window)
    callers = gather(search, [(["a", "b"], 3), (["b", "c"], 3), (["a"], 3), (["d", "d"], 3)])
    window.close()
    expected = [[found(query, 3) for query in queries] for queries in ("ab", "bc", "a", "dd")]
    assert outcomes(callers) == expected
    assert [sorted(call) for call in backend.calls] == [list("abcd")]
    assert (search.asked, search.sent) == (7, 4)


def test_each_k_is_its_own_request() -> None:
    backend, window = FakeSearch(), Window()
    search = CoalescingSearch(backend, sleep=window)
    callers = gather(search, [(["abc"], 1), (["abc"], 2), (["abc"], 1)])
    window.close()
    assert outcomes(callers) == [[found("abc", k)] for k in (1, 2, 1)]
    assert backend.calls == [["abc"], ["abc"]]


class GatedSearch(FakeSearch):
    """A call with `slow` in it waits for `gate`, once it has said so through `entered`."""

    def __init__(self, failures: Sequence[BaseException] = ()) -> None:
        super().__init__(failures)
        self.entered, self.gate = threading.Event(), threading.Event()

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        if "slow" in queries:
            self.entered.set()
            assert self.gate.wait(20)
        return super().search_batch(queries, k)


@pytest.mark.parametrize("failure", [None, SearchUnavailable("down")])
def test_who_asks_what_is_being_asked_waits_for_that_answer(failure: Exception | None) -> None:
    backend = GatedSearch([failure] if failure else [])
    search = CoalescingSearch(backend, window_s=0)
    first = Caller(search, ["slow"])
    assert backend.entered.wait(20)
    second = Caller(search, ["slow", "slow"])
    wait_until_asked(search, 3)
    backend.gate.set()
    slow = found("slow", 3)
    assert outcomes([first, second]) == ([failure, failure] if failure else [[slow], [slow, slow]])
    assert backend.calls == [["slow"]]


def test_another_query_does_not_wait_for_a_slow_one() -> None:
    backend = GatedSearch()
    search = CoalescingSearch(backend, window_s=0)
    slow = Caller(search, ["slow"])
    assert backend.entered.wait(20)
    assert search.search_batch(["fast"], 3) == [found("fast", 3)]
    backend.gate.set()
    assert outcomes([slow]) == [[found("slow", 3)]]


@pytest.mark.parametrize("error", [SearchUnavailable("down"), KeyError("bug")])
def test_a_failure_reaches_every_caller(error: Exception) -> None:
    backend, window = FakeSearch([error]), Window()
    search = CoalescingSearch(backend, sleep=window)
    callers = gather(search, [([query], 3) for query in "abcde"])
    window.close()
    assert outcomes(callers) == [error] * 5
    assert len(backend.calls) == 1


def test_a_failure_is_not_kept() -> None:
    search = CoalescingSearch(FakeSearch([SearchUnavailable("down")]), window_s=0)
    with pytest.raises(SearchUnavailable):
        search.search_batch(["a"], 3)
    assert search.search_batch(["a"], 3) == [found("a", 3)]


class PickySearch(FakeSearch):
    """Refuses every request with "bad" in it, and is down for those with "fatal"."""

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        results = super().search_batch(queries, k)
        if "bad" in queries:
            raise SearchError("refused")
        if queries == ["fatal"]:
            raise SearchUnavailable("down")
        return results


def test_nobody_is_refused_for_what_another_asked() -> None:
    backend, window = PickySearch(), Window()
    search = CoalescingSearch(backend, sleep=window)
    callers = gather(search, [(["a"], 3), (["b", "bad"], 3), (["c"], 3)])
    window.close()
    a, refused, c = outcomes(callers)
    assert (a, c) == ([found("a", 3)], [found("c", 3)])
    assert isinstance(refused, SearchError)
    assert sorted(map(len, backend.calls)) == [1, 1, 1, 1, 4]


def test_an_engine_that_goes_down_in_between_is_not_asked_on() -> None:
    backend = PickySearch()
    search = CoalescingSearch(backend, window_s=0)
    with pytest.raises(SearchUnavailable):
        search.search_batch(["a", "fatal", "bad", "z"], 3)
    assert backend.calls == [["a", "fatal", "bad", "z"], ["a"], ["fatal"]]
    assert search.search_batch(["z"], 3) == [found("z", 3)]


@pytest.mark.parametrize("where", ["while gathering", "while asking"])
def test_a_leader_that_is_interrupted_frees_the_others(where: str) -> None:
    window = Window()

    def interrupted(seconds: float) -> None:
        window(seconds)
        if where == "while gathering":
            raise KeyboardInterrupt

    backend = FakeSearch([KeyboardInterrupt()] if where == "while asking" else [])
    search = CoalescingSearch(backend, sleep=interrupted)
    leader = gather(search, [(["a"], 3)])
    others = [Caller(search, [query]) for query in "abc"]
    wait_until_asked(search, 4)
    window.close()
    assert [type(outcome) for outcome in outcomes(leader + others)] == [KeyboardInterrupt] + [SearchUnavailable] * 3
    backend.failures = []
    healthy = CoalescingSearch(backend, window_s=0)
    assert healthy.search_batch(["a"], 3) == [found("a", 3)]


def test_a_lost_result_is_a_bug_of_the_backend() -> None:
    search = CoalescingSearch(LosingSearch(), window_s=0)
    with pytest.raises(RuntimeError, match="1 results for 2 queries"):
        search.search_batch(["a", "b"], 3)


def test_many_threads_many_times() -> None:
    """Whatever the threads do to each other, each gets its own answers and all come back."""
    backend = FakeSearch()
    search = CoalescingSearch(backend, window_s=0)
    start = threading.Barrier(8, timeout=20)
    wrong: list[object] = []

    def ask(number: int) -> None:
        for i in range(100):
            start.wait()
            queries = [f"q{(number * i) % 5}", f"q{i % 3}"]
            if search.search_batch(queries, 2) != [found(query, 2) for query in queries]:
                wrong.append(queries)

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert wrong == []
    assert search.asked == 1600
    assert search.sent == sum(map(len, backend.calls)) <= 1600
    assert search._waited_for == search._gathering == {}


def test_callers_cannot_change_each_others_answers() -> None:
    backend, window = FakeSearch(), Window()
    search = CoalescingSearch(backend, sleep=window)
    callers = gather(search, [(["a"], 3), (["a"], 3)])
    window.close()
    first, second = outcomes(callers)
    first[0].clear()
    assert second == [found("a", 3)]


def test_no_query_is_no_call() -> None:
    backend = FakeSearch()
    assert CoalescingSearch(backend).search_batch([], 3) == []
    assert backend.calls == []


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="`window_s` is -1, but must be at least 0"):
        CoalescingSearch(FakeSearch(), window_s=-1)
    with pytest.raises(ValueError, match="`k` is 0, but must be a whole number, at least 1"):
        CoalescingSearch(FakeSearch()).search_batch([], 0)


def test_a_copy_works() -> None:
    copy = pickle.loads(pickle.dumps(CoalescingSearch(FakeSearch(), window_s=0)))
    assert copy.search_batch(["a"], 3) == [found("a", 3)]
