"""What the client reads in answers of every known form, and a real server that misbehaves on purpose."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.search.servers import Reply, Server

from sorl_trl.search import HTTPSearch, MalformedResponse, SearchError, SearchUnavailable
from sorl_trl.search.client import BATCH_SIZE, parse_response
from sorl_trl.types import Passage

PARIS = '"Paris"\nOn the Seine.'
ROME = '"Rome"\nOn the Tiber.'


@pytest.mark.parametrize(
    ("hit", "passage"),
    [
        # Search-R1, dense and BM25
        ({"document": {"id": 7, "contents": PARIS}, "score": -2}, Passage("7", "Paris", "On the Seine.", -2.0)),
        (
            {"document": {"title": "Paris", "text": "On the Seine.", "contents": PARIS}, "score": 9.5},
            Passage("", "Paris", "On the Seine.", 9.5),
        ),
        # its reranker, its web search, slime, rLLM, MedRAG
        ({"document": PARIS, "score": 1}, Passage("", "Paris", "On the Seine.", 1.0)),
        ({"document": {"contents": PARIS}}, Passage("", "Paris", "On the Seine.")),
        ({"id": "7", "contents": PARIS}, Passage("7", "Paris", "On the Seine.")),
        ({"id": "7", "content": PARIS, "score": 0.25}, Passage("7", "Paris", "On the Seine.", 0.25)),
        (
            {"document": {"id": "m", "title": "T", "content": "c\nd", "contents": "T. c d"}, "score": None},
            Passage("m", "T", "c\nd"),
        ),
        # others
        ({"text": "On the Seine."}, Passage("", "", "On the Seine.")),
        ([{"id": "7", "contents": PARIS}, 3], Passage("7", "Paris", "On the Seine.", 3.0)),
        ([PARIS, 0.5], Passage("", "Paris", "On the Seine.", 0.5)),
        ("On the Seine.", Passage("", "", "On the Seine.")),
        ('""Heroes""\nA song.', Passage("", '"Heroes"', "A song.")),
        ({"id": None, "contents": PARIS}, Passage("", "Paris", "On the Seine.")),
    ],
)
def test_the_hit_of_each_variant(hit: object, passage: Passage) -> None:
    assert parse_response({"results": [[hit]]}, 1, 3) == [[passage]]
    assert parse_response({"result": [[hit, hit], []]}, 2, 3) == [[passage, passage], []]
    assert parse_response({"result": [[hit, hit]]}, 1, 1) == [[passage]], "hits beyond k are cut"


@pytest.mark.parametrize(
    ("score", "read"),
    [
        *[("1.5", 1.5), (" -2 ", -2.0), ("high", None), ("", None), ("nan", None), (True, None), ([1], None)],
        *[(float("nan"), None), (float("inf"), None), (-float("inf"), None), (10**400, None)],
    ],
)
def test_a_score_is_a_finite_number_however_spelled_or_none(score: object, read: float | None) -> None:
    passage = Passage("", "Paris", "On the Seine.", read)
    assert parse_response({"result": [[{"document": PARIS, "score": score}]]}, 1, 3) == [[passage]]


@pytest.mark.parametrize("null", [None, {"document": None}, {"document": None, "score": 0.5}])
def test_a_hit_without_a_document_is_left_out_and_null_is_no_hit(null: object) -> None:
    paris, rome = Passage("", "Paris", "On the Seine."), Passage("", "Rome", "On the Tiber.")
    response = {"result": [[null, PARIS, null, ROME], [PARIS, null], [null], [], None]}
    assert parse_response(response, 5, 2) == [[paris, rome], [paris], [], [], []]


def test_two_strings_in_the_place_of_hits_are_two_hits() -> None:
    hits = [Passage("", "", "a document"), Passage("", "", "0.5")]
    assert parse_response({"result": [["a document", "0.5"]]}, 1, 3) == [hits]


def test_half_a_surrogate_pair_in_a_passage_is_replaced() -> None:
    document = json.loads(r'{"id": "\ud800", "title": "\udc00T", "text": "a\ud83db\ud83d\ude00"}')
    passage = Passage("\ufffd", "\ufffdT", "a\ufffdb\N{GRINNING FACE}")
    assert parse_response({"result": [[document]]}, 1, 3) == [[passage]]


@pytest.mark.parametrize(
    "response",
    [
        *[[], {}, {"result": None}, {"error": "no query"}, {"result": {"a": 1}}],
        *[{"result": []}, {"result": [[]]}, {"result": [[], [], []]}],
        *[{"result": [[], {"document": PARIS}]}, {"result": [[], [PARIS, 0.5]]}, {"result": [[], [3]]}],
        {"result": [[], [[PARIS, 0.5, 1]]]},
        {"result": [[], [["Seine", "Tiber"]]]},  # a pair would lose the second
        *[{"result": [[], [{}]]}, {"result": [[], [{"text": 3}]]}],
    ],
)
def test_what_is_no_result_is_shown(response: object) -> None:
    with pytest.raises(MalformedResponse) as caught:
        parse_response(response, 2, 3)
    assert repr(json.dumps(response)[:200]) in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["document", "id", "score", "title", "text", "contents"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(result=json_values)
def test_any_json_is_read_or_refused(result: object) -> None:
    try:
        (passages,) = parse_response({"result": result}, 1, 2)
    except MalformedResponse:
        return
    assert len(passages) <= 2
    assert all(f"{p.id}{p.title}{p.text}".encode() or p.text == "" for p in passages)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    yield server
    server.close()


def hit(query: str, k: int = 3) -> list[Passage]:
    return [Passage("", str(k), query, 0.5)]


def test_a_batch_is_one_request_over_a_connection_that_is_kept(server: Server) -> None:
    search = HTTPSearch(server.url)
    for _ in range(3):
        assert search.search_batch(["a", "東京", "a\ud800b"], 3) == [hit("a"), hit("東京"), hit("a\ufffdb")]
    assert server.requests == [{"queries": ["a", "東京", "a\ufffdb"], "topk": 3, "return_scores": True}] * 3
    assert len(server.connections) == 1
    assert search.search_batch([], 3) == []


def test_large_batches_are_split_and_keep_their_order(server: Server) -> None:
    queries = [f"q{i}" for i in range(2 * BATCH_SIZE + 1)]
    assert HTTPSearch(server.url).search_batch(queries, 3) == [hit(query) for query in queries]
    assert sorted(len(request["queries"]) for request in server.requests) == [1, BATCH_SIZE, BATCH_SIZE]


def test_one_failed_request_fails_the_batch_at_once(server: Server) -> None:
    """Without waiting for the others, which the server never answers."""
    ended = threading.Event()
    hanging = Reply([b"{"], pause=ended.wait)
    server.reply = lambda request: Reply(status=503) if "q0" in request["queries"] else hanging
    with pytest.raises(SearchUnavailable, match="HTTP 503"):
        HTTPSearch(server.url, timeout_s=600).search_batch([f"q{i}" for i in range(100)], 3)
    ended.set()


SEARCH = """
import os, signal, sys, threading
from sorl_trl.search import HTTPSearch
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
HTTPSearch(sys.argv[1], timeout_s=600).search_batch([f"q{i}" for i in range(100)], 3)
"""


@pytest.mark.trains
def test_ctrl_c_ends_a_search_whose_server_hangs(server: Server) -> None:
    ended = threading.Event()
    server.reply = lambda _: Reply([b"{"], pause=ended.wait)
    done = subprocess.run([sys.executable, "-c", SEARCH, server.url], timeout=60, stderr=subprocess.PIPE)
    ended.set()
    assert done.returncode == -signal.SIGINT, done.stderr
    assert server.requests


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


@pytest.mark.parametrize(
    ("statuses", "error"),
    [
        ((400, 413, 414, 422), SearchError),
        ((401, 403, 404, 405), MalformedResponse),
        ((408, 429, 500, 502, 503, 504), SearchUnavailable),
    ],
)
def test_a_status_says_whose_fault_it_is(server: Server, statuses: tuple[int, ...], error: type[Exception]) -> None:
    for status in statuses:
        server.reply = lambda _, status=status: Reply(b"out of memory" + b"!" * 10_000, status)
        with pytest.raises(error, match=f"{server.url}: HTTP {status}.*out of memory!!!") as caught:
            HTTPSearch(server.url).search_batch(["a"], 3)
        assert len(str(caught.value)) < 400


def test_a_redirect_is_not_followed(server: Server) -> None:
    server.reply = lambda _: Reply(status=307, headers={"Location": "/elsewhere"})
    with pytest.raises(MalformedResponse, match="HTTP 307 to '/elsewhere'"):
        HTTPSearch(server.url).search_batch(["a"], 3)


@pytest.mark.parametrize(
    "reply",
    [
        *map(Reply, [b"", b"<html>login</html>", b"{", b"\xff\xfe\xff", b"[" * 100_000]),
        Reply(b'{"result": [[', headers={"Content-Length": "1000", "Connection": "close"}),
        Reply(b"not gzip", headers={"Content-Encoding": "gzip"}),
        Reply(b"{", reset=True),
    ],
    ids=["nothing", "html", "half an object", "no text", "too deep", "broken off", "no gzip", "reset"],
)
def test_a_body_that_is_not_json_or_never_arrives_is_unavailable(server: Server, reply: Reply) -> None:
    server.reply = lambda _: reply
    with pytest.raises(SearchUnavailable):
        HTTPSearch(server.url).search_batch(["a"], 3)


def test_a_body_that_drips_for_ever_is_given_up(server: Server) -> None:
    """Each byte comes in time, and the whole never does."""
    ended = threading.Event()
    server.reply = lambda _: Reply([b" "] * 100_000, pause=lambda: ended.wait(0.01))
    with pytest.raises(SearchUnavailable, match=r"0\.1 s"):
        HTTPSearch(server.url, timeout_s=0.1).search_batch(["a"], 3)
    ended.set()


def test_a_body_without_end_is_no_search_result(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sorl_trl.search.client.LONGEST_RESPONSE", 1000)
    server.reply = lambda _: Reply([b"x" * 100] * 1000)
    with pytest.raises(MalformedResponse, match="1,000 bytes"):
        HTTPSearch(server.url).search_batch(["a"], 3)


@pytest.mark.parametrize(
    "url",
    [
        *["", "localhost:8000/retrieve", "ftp://host/retrieve", "http://", "http://host:port/retrieve", "/retrieve"],
        *["http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/?k=3"],
    ],
)
def test_a_url_without_a_server_or_a_path_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="url must be an http or https URL with a path"):
        HTTPSearch(url)
