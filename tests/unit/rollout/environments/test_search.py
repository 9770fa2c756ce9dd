from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sorl_trl.rollout import Reply, RetryPolicy, SearchResponder, TagProtocol
from sorl_trl.search import SearchError, SearchUnavailable
from sorl_trl.types import Passage, StopReason

from ..fakes import PARIS, FakeSearch

NO_WAIT = RetryPolicy(attempts=3, initial_wait_s=0)


FOUND = Reply(TagProtocol().render_passages([PARIS]), (PARIS,))
REFUSED = Reply(TagProtocol().search_failed)
DOWN = Reply(stop=StopReason.SEARCH_UNAVAILABLE)


def responder(search: FakeSearch) -> SearchResponder:
    return SearchResponder(search, retry=NO_WAIT)


def test_each_distinct_query_is_asked_once_in_order() -> None:
    search = FakeSearch()
    assert responder(search).search(["b", "a", "b", "a"]) == {"b": FOUND, "a": FOUND}
    assert search.calls == [["b", "a"]]


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
    assert responder(search).search("abc") == {"a": FOUND, "b": REFUSED, "c": FOUND}
    assert search.calls == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    assert responder(PickySearch(bad="b")).search("b") == {"b": REFUSED}


def test_an_engine_that_goes_down_in_between_is_not_asked_on() -> None:
    search = PickySearch(bad="b", fatal="c")
    assert responder(search).search("abcd") == {"a": FOUND, "b": REFUSED, "c": DOWN, "d": DOWN}
    assert ["d"] not in search.calls


@pytest.mark.parametrize("found", [None, [None], {"a": []}, [[{"text": "t"}]]])
def test_what_is_no_passage_is_said(found: Any) -> None:
    search = FakeSearch()
    search.search_batch = lambda queries, k: found  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="must return a list of `Passage` for each query"):
        responder(search).search("a")
