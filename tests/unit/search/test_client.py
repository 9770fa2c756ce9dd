"""What the client reads in an answer, and a real server that misbehaves on purpose."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest
from tests.unit.search.servers import Reply, Server

from sorl_trl.search import HTTPSearch, MalformedResponse, SearchError, SearchUnavailable
from sorl_trl.search.client import parse_response
from sorl_trl.types import Passage

PARIS = '"Paris"\nOn the Seine.'


@pytest.mark.parametrize(
    ("hit", "passage"),
    [
        ({"document": {"id": 7, "contents": PARIS}, "score": -2}, Passage("7", "Paris", "On the Seine.", -2.0)),
        (
            {"document": {"title": "Paris", "text": "On the Seine.", "contents": "other"}, "score": 9.5},
            Passage("", "Paris", "On the Seine.", 9.5),
        ),
        ({"id": "7", "contents": PARIS}, Passage("7", "Paris", "On the Seine.")),
        *[
            ({"document": {"contents": PARIS}, "score": score}, Passage("", "Paris", "On the Seine."))
            for score in (None, "high", float("nan"), -float("inf"), 10**400)
        ],
        (
            {"document": json.loads(r'{"id": "\ud800", "title": "\udc00T", "text": "a\ud83db\ud83d\ude00"}')},
            Passage("\ufffd", "\ufffdT", "a\ufffdb\N{GRINNING FACE}"),
        ),
    ],
)
def test_a_hit_with_its_score_or_without(hit: object, passage: Passage) -> None:
    assert parse_response({"result": [[hit, hit], []]}, 2, 3) == [[passage, passage], []]
    assert parse_response({"result": [[hit, hit]]}, 1, 1) == [[passage]], "hits beyond k are cut"


@pytest.mark.parametrize(
    "response",
    [
        *[[], {}, {"result": None}, {"result": {"a": 1}}, {"result": [[]]}, {"result": [[], [], []]}],
        *[{"result": [[], None]}, {"result": [[], {"document": {"contents": PARIS}}]}, {"result": [[], [3]]}],
        *[{"result": [[], [{}]]}, {"result": [[], [{"document": None}]]}, {"result": [[], [{"contents": 3}]]}],
    ],
)
def test_what_is_no_result_is_refused(response: object) -> None:
    with pytest.raises(MalformedResponse):
        parse_response(response, 2, 3)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    yield server
    server.close()


def hit(query: str) -> list[Passage]:
    return [Passage("", "3", query, 0.5)]


def test_a_batch_is_one_request_over_a_connection_that_is_kept(server: Server) -> None:
    search = HTTPSearch(server.url)
    for _ in range(3):
        assert search.search_batch(["a", "東京", "a\ud800b"], 3) == [hit("a"), hit("東京"), hit("a\ufffdb")]
    assert server.requests == [{"queries": ["a", "東京", "a\ufffdb"], "topk": 3, "return_scores": True}] * 3
    assert len(server.connections) == 1
    assert search.search_batch([], 3) == []


def test_a_password_is_sent_and_never_shown(server: Server) -> None:
    private = server.url.replace("://", "://me:s3cret@")
    assert HTTPSearch(private).search_batch(["a"], 3) == [hit("a")]
    assert server.credentials == ["Basic " + base64.b64encode(b"me:s3cret").decode()]
    server.reply = lambda request: Reply(b"no", status=401)
    with pytest.raises(MalformedResponse) as refused:
        HTTPSearch(private).search_batch(["a"], 3)
    assert "s3cret" not in str(refused.value)
    with pytest.raises(ValueError, match="url") as error:
        HTTPSearch("http://me:s3cret@127.0.0.1")
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("statuses", "error"),
    [
        ((400, 413, 414, 422), SearchError),
        ((307, 401, 403, 404, 405), MalformedResponse),
        ((408, 429, 500, 502, 503, 504), SearchUnavailable),
    ],
)
def test_a_status_shows_who_is_at_fault(server: Server, statuses: tuple[int, ...], error: type[Exception]) -> None:
    for status in statuses:
        server.reply = lambda _, status=status: Reply(b"out of memory" + b"!" * 10_000, status)
        with pytest.raises(error, match=f"{server.url}: HTTP {status}.*out of memory!!!") as caught:
            HTTPSearch(server.url).search_batch(["a"], 3)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "reply",
    [
        *map(Reply, [b"<html>login</html>", b"\xff\xfe\xff", b"[" * 100_000]),
        Reply(b'{"result": [[', headers={"Content-Length": "1000", "Connection": "close"}),
        Reply(b"not gzip", headers={"Content-Encoding": "gzip"}),
        Reply(b"{", reset=True),
    ],
    ids=["html", "no text", "too deep", "broken off", "no gzip", "reset"],
)
def test_a_body_that_is_not_json_or_never_arrives_is_unavailable(server: Server, reply: Reply) -> None:
    server.reply = lambda _: reply
    with pytest.raises(SearchUnavailable):
        HTTPSearch(server.url).search_batch(["a"], 3)


@pytest.mark.parametrize("url", ["localhost:8000/retrieve", "http://host:port/retrieve", "http://127.0.0.1:8000/"])
def test_a_url_without_a_server_or_a_path_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        HTTPSearch(url)
