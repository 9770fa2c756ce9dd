from __future__ import annotations

from collections.abc import Sequence

import pytest

from sorl_trl.rollout import RetryPolicy
from sorl_trl.rollout.environments.search import Retriever, SearchFailure
from sorl_trl.search import SearchError, SearchUnavailable
from sorl_trl.types import Passage

from ..fakes import PARIS, FakeSearch

NO_WAIT = RetryPolicy(attempts=3, initial_wait_s=0)


def retriever(search: FakeSearch, retry: RetryPolicy = NO_WAIT) -> Retriever:
    return Retriever(search, top_k=3, retry=retry)


def test_each_distinct_query_is_asked_once_in_order() -> None:
    search = FakeSearch()
    assert retriever(search).search(["b", "a", "b", "a"]) == {"b": (PARIS,), "a": (PARIS,)}
    assert search.calls == [["b", "a"]]


@pytest.mark.parametrize("error", [SearchUnavailable("down"), ConnectionError("reset"), TimeoutError("slow")])
def test_an_engine_that_recovers_is_waited_for(error: Exception) -> None:
    search = FakeSearch([error, error])
    assert retriever(search).search(["a"]) == {"a": (PARIS,)}
    assert len(search.calls) == 3


def test_an_engine_that_stays_down_is_given_up() -> None:
    search = FakeSearch([SearchUnavailable("down")] * 9)
    assert retriever(search).search(["a", "b"]) == dict.fromkeys("ab", SearchFailure.UNAVAILABLE)
    assert len(search.calls) == 3


class PickySearch(FakeSearch):
    """Refuses every request with one of `bad` in it; is down for those with one of `fatal`."""

    def __init__(self, bad: str, fatal: str = "") -> None:
        super().__init__()
        self.bad, self.fatal = bad, fatal

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        found = super().search_batch(queries, k)
        if set(queries) & set(self.bad):
            raise SearchError("refused")
        if set(queries) & set(self.fatal):
            raise SearchUnavailable("down")
        return found


def test_a_refused_query_spoils_no_other() -> None:
    search = PickySearch(bad="b")
    assert retriever(search).search("abc") == {"a": (PARIS,), "b": SearchFailure.REFUSED, "c": (PARIS,)}
    assert search.calls == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    assert retriever(PickySearch(bad="b")).search("b") == {"b": SearchFailure.REFUSED}


def test_an_engine_that_goes_down_in_between_is_not_asked_on() -> None:
    search = PickySearch(bad="b", fatal="c")
    down = SearchFailure.UNAVAILABLE
    assert retriever(search).search("abcd") == {"a": (PARIS,), "b": SearchFailure.REFUSED, "c": down, "d": down}
    assert ["d"] not in search.calls


class ShortSearch(FakeSearch):
    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return super().search_batch(queries, k)[1:]


def test_programming_errors_propagate() -> None:
    with pytest.raises(RuntimeError, match="1 results for 2 queries"):
        retriever(ShortSearch()).search("ab")
    with pytest.raises(KeyError):
        retriever(FakeSearch([KeyError("bug")])).search("ab")
