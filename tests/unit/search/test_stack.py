"""All wrappers around each other, in the order that `CachedSearch` names, over a real server."""

from __future__ import annotations

import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unit.search.backends import Caller, outcomes
from tests.unit.search.servers import Reply, Server, echo

from sorl_trl.rollout.environments.search import Retriever, SearchFailure
from sorl_trl.search import SearchBackend
from sorl_trl.search.around.breaker import CircuitBreaker, CircuitOpen
from sorl_trl.search.around.cache import CachedSearch, SQLiteStore
from sorl_trl.search.around.coalesce import CoalescingSearch
from sorl_trl.search.around.replay import RecordingSearch, ReplayedSearch
from sorl_trl.search.around.retry import RetryingSearch, RetryPolicy
from sorl_trl.search.server.client import HTTPSearch
from sorl_trl.types import Passage

NO_WAIT = RetryPolicy(attempts=4, initial_wait_s=0)


def stack(url: str, directory: Path) -> RecordingSearch:
    backend: SearchBackend = CircuitBreaker(RetryingSearch(HTTPSearch(url), NO_WAIT), failures=2)
    backend = CoalescingSearch(backend, window_s=0)
    backend = CachedSearch(backend, url, SQLiteStore(directory / "cache.sqlite"))
    return RecordingSearch(backend, directory / "searches.jsonl")


def hit(query: str) -> list[Passage]:
    return [Passage("", "3", query, 0.5)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with closing(Server()) as server:
        yield server


def test_a_run_through_an_outage_and_its_replay(server: Server, tmp_path: Path) -> None:
    troubles = [Reply(status=503), Reply(b"<html>"), Reply(status=429)]
    server.reply = lambda request: troubles.pop() if troubles else echo(request)
    search = stack(server.url, tmp_path)
    assert search.search_batch(["a", "b"], 3) == [hit("a"), hit("b")]
    assert len(server.requests) == 4
    callers = [Caller(search, [query, "a"]) for query in "bcbd"]
    assert outcomes(callers) == [[hit(query), hit("a")] for query in "bcbd"]
    assert sorted(query for request in server.requests[4:] for query in request["queries"]) == ["c", "d"]
    replayed = ReplayedSearch(tmp_path / "searches.jsonl")
    assert replayed.search_batch(list("dcba"), 3) == [hit(query) for query in "dcba"]


def test_a_copy_of_it_all_answers_from_the_same_cache(server: Server, tmp_path: Path) -> None:
    search = stack(server.url, tmp_path)
    search.search_batch(["a"], 3)
    assert pickle.loads(pickle.dumps(search)).search_batch(["a"], 3) == [hit("a")]
    assert len(server.requests) == 1


def test_a_dead_server_is_left_alone(server: Server, tmp_path: Path) -> None:
    """Two searches of four attempts each; the third is not even tried."""
    server.reply = lambda _: Reply(status=500)
    search = stack(server.url, tmp_path)
    retriever = Retriever(search, top_k=3, retry=NO_WAIT)
    for _ in range(3):
        assert retriever.search(["a"]) == {"a": SearchFailure.UNAVAILABLE}
    assert len(server.requests) == 8
    with pytest.raises(CircuitOpen, match="failed 2 times in a row"):
        search.search_batch(["a"], 3)


def test_a_refused_query_spoils_no_other(server: Server, tmp_path: Path) -> None:
    def picky(request: dict[str, Any]) -> Reply:
        return Reply(b"too short", 422) if "" in request["queries"] else echo(request)

    server.reply = picky
    search = stack(server.url, tmp_path)
    expected = {"a": tuple(hit("a")), "": SearchFailure.REFUSED, "b": tuple(hit("b"))}
    assert Retriever(search, top_k=3, retry=NO_WAIT).search(["a", "", "b"]) == expected
    replayed = ReplayedSearch(tmp_path / "searches.jsonl")
    assert Retriever(replayed, top_k=3, retry=NO_WAIT).search(["a", "", "b"]) == expected
