"""The client against a real server on this machine that misbehaves on purpose."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator

import pytest
from tests.unit.search.servers import Reply, Server, echo

from sorl_trl.search import SearchError, SearchUnavailable
from sorl_trl.search.client import BATCH_SIZE, HTTPSearch
from sorl_trl.search.wire import MalformedResponse
from sorl_trl.types import Passage


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    yield server
    server.close()


def hit(query: str, k: int = 3) -> list[Passage]:
    return [Passage("", str(k), query, 0.5)]


def test_a_batch_is_one_request(server: Server) -> None:
    assert HTTPSearch(server.url).search_batch(["a", "東京"], 3) == [hit("a"), hit("東京")]
    assert server.requests == [{"queries": ["a", "東京"], "topk": 3, "return_scores": True}]


def test_large_batches_are_split_and_keep_their_order(server: Server) -> None:
    queries = [f"q{i}" for i in range(2 * BATCH_SIZE + 1)]
    assert HTTPSearch(server.url).search_batch(queries, 3) == [hit(query) for query in queries]
    assert sorted(len(request["queries"]) for request in server.requests) == [1, BATCH_SIZE, BATCH_SIZE]


def test_a_password_is_sent_and_never_shown(server: Server) -> None:
    private = server.url.replace("://", "://me:s3cret@")
    assert HTTPSearch(private).search_batch(["a"], 3) == [hit("a")]
    assert server.credentials == ["Basic " + base64.b64encode(b"me:s3cret").decode()]
    server.reply = lambda request: Reply(b"no", status=401)
    with pytest.raises(MalformedResponse) as refused:
        HTTPSearch(private).search_batch(["a"], 3)
    assert str(refused.value).startswith(f"{server.url}: HTTP 401")
    with pytest.raises(ValueError) as error:
        HTTPSearch("http://me:s3cret@127.0.0.1")
    assert "got 'http://127.0.0.1'" in str(error.value) and "s3cret" not in str(error.value)


def test_connections_are_reused(server: Server) -> None:
    search = HTTPSearch(server.url)
    for _ in range(3):
        search.search_batch(["a"], 3)
    assert len(server.connections) == 1


def test_half_a_surrogate_pair_is_sent_as_a_replacement(server: Server) -> None:
    assert HTTPSearch(server.url).search_batch(["a\ud800b"], 3) == [hit("a\ufffdb")]
    assert server.requests[0]["queries"] == ["a\ufffdb"]


@pytest.mark.parametrize("status", [400, 413, 414, 422])
def test_a_refusal_has_the_servers_words(server: Server, status: int) -> None:
    server.reply = lambda _: Reply(b'{"detail": "topk must be below 100"}', status)
    with pytest.raises(SearchError, match=rf"{server.url}: HTTP {status}: .*topk must be below 100"):
        HTTPSearch(server.url).search_batch(["a"], 3)


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_refusal_of_every_request_is_a_mistake_in_the_setup(server: Server, status: int) -> None:
    server.reply = lambda _: Reply(b"no such page", status)
    with pytest.raises(MalformedResponse, match=f"HTTP {status}.*no such page"):
        HTTPSearch(server.url).search_batch(["a"], 3)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_server_in_trouble_is_unavailable(server: Server, status: int) -> None:
    server.reply = lambda _: Reply(b"out of memory" + b"!" * 10_000, status)
    with pytest.raises(SearchUnavailable, match=f"HTTP {status}: 'out of memory!!!") as caught:
        HTTPSearch(server.url).search_batch(["a"], 3)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("body", [b"", b"<html>login</html>", b"{", b"\xff\xfe\xff", b"[" * 100_000])
def test_what_is_not_json_is_unavailable(server: Server, body: bytes) -> None:
    server.reply = lambda _: Reply(body)
    with pytest.raises(SearchUnavailable, match="the response is not JSON"):
        HTTPSearch(server.url).search_batch(["a"], 3)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(b'{"result": [[', headers={"Content-Length": "1000", "Connection": "close"}),
        Reply(b"not gzip", headers={"Content-Encoding": "gzip"}),
        Reply(b"{", reset=True),
    ],
    ids=["broken off", "no gzip", "reset"],
)
def test_a_body_that_never_arrives_is_unavailable(server: Server, reply: Reply) -> None:
    server.reply = lambda _: reply
    with pytest.raises(SearchUnavailable):
        HTTPSearch(server.url).search_batch(["a"], 3)


def test_a_redirect_is_not_followed(server: Server) -> None:
    server.reply = lambda _: Reply(status=307, headers={"Location": "/elsewhere"})
    with pytest.raises(MalformedResponse, match="HTTP 307 to '/elsewhere': give that URL"):
        HTTPSearch(server.url).search_batch(["a"], 3)


def test_a_body_that_drips_for_ever_is_given_up(server: Server) -> None:
    """Each byte comes in time, and the whole never does."""
    ended = threading.Event()
    pieces = [b" "] * 100_000
    server.reply = lambda _: Reply(pieces, pause=lambda: ended.wait(0.01))
    with pytest.raises(SearchUnavailable, match=r"not whole after 0\.1 s"):
        HTTPSearch(server.url, timeout_s=0.1).search_batch(["a"], 3)
    ended.set()


def test_a_body_without_end_is_no_search_result(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sorl_trl.search.client.LONGEST_RESPONSE", 1000)
    server.reply = lambda _: Reply([b"x" * 100] * 1000)
    with pytest.raises(MalformedResponse, match="more than 1,000 bytes"):
        HTTPSearch(server.url).search_batch(["a"], 3)


def test_one_failed_request_fails_the_batch(server: Server) -> None:
    server.reply = lambda request: Reply(status=503) if "q99" in request["queries"] else echo(request)
    with pytest.raises(SearchUnavailable, match="HTTP 503"):
        HTTPSearch(server.url).search_batch([f"q{i}" for i in range(100)], 3)


@pytest.mark.parametrize(
    "url", ["", "localhost:8000/retrieve", "ftp://host/retrieve", "http://", "http://host:port/retrieve", "/retrieve"]
)
def test_a_url_without_a_server_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="url must be an http or https URL"):
        HTTPSearch(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/?k=3"])
def test_a_url_without_a_path_is_refused_with_a_hint(url: str) -> None:
    with pytest.raises(ValueError, match=r"with a path, such as http://127.0.0.1:8000/retrieve, got 'http"):
        HTTPSearch(url)
