from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sorl_trl.rollout import Reply, RetryPolicy, SearchResponder, TagProtocol
from sorl_trl.search import SearchError
from sorl_trl.types import Passage, StopReason

from ..fakes import PARIS, FakeSearch

NO_WAIT = RetryPolicy(attempts=3, initial_wait_s=0)


FOUND = Reply(TagProtocol().render_passages([PARIS]), (PARIS,))
REFUSED = Reply(TagProtocol().search_failed)
DOWN = Reply(stop=StopReason.SEARCH_UNAVAILABLE)


def responder(search: FakeSearch) -> SearchResponder:
    return SearchResponder(search, retry=NO_WAIT)


class PickySearch(FakeSearch):
    """Refuses every request with "b" in it."""

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        found = super().search_batch(queries, k)
        if "b" in queries:
            raise SearchError("refused")
        return found


def test_a_refused_query_spoils_no_other() -> None:
    search = PickySearch()
    assert responder(search).search("abc") == {"a": FOUND, "b": REFUSED, "c": FOUND}
    assert search.calls == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    assert responder(PickySearch()).search("b") == {"b": REFUSED}


@pytest.mark.parametrize("found", [None, [None], {"a": []}, [[{"text": "t"}]]])
def test_what_is_no_passage_is_said(found: Any) -> None:
    search = FakeSearch()
    search.search_batch = lambda queries, k: found  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="must return a list of `Passage` for each query"):
        responder(search).search("a")
