"""The web application by itself: what it answers and refuses, asked over ASGI without a socket."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from dataclasses import dataclass

import pytest

from sorl_trl.search.server.app import ServerLimits, create_app

LIMITS = ServerLimits(request_bytes=1000, queries=3, topk=5, query_characters=20)


@dataclass(frozen=True)
class Answer:
    status: int
    body: dict


def ask(app, chunks, path="/retrieve", method="POST") -> Answer:
    """Send a request whose body comes in chunks."""
    headers = [(b"content-type", b"application/json"), (b"host", b"test")]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    pending = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    pending.append({"type": "http.request", "body": b""})
    sent = []

    async def receive():
        return pending.pop(0) if pending else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope | {"headers": headers, "http_version": "1.1", "scheme": "http"}, receive, send))
    return Answer(sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent)))


def retrieve(app, **fields) -> Answer:
    return ask(app, [json.dumps(fields).encode()])


@pytest.fixture(scope="module")
def app(index):
    return create_app(index, LIMITS)


def document(passage):
    contents = f'"{passage.title}"\n{passage.text}'
    return {"id": passage.id, "title": passage.title, "text": passage.text, "contents": contents}


def test_hits_with_scores(app, index):
    found = index.search_batch(["Rome", "zzz", "capital"], 2)
    expected = [[{"document": document(hit), "score": hit.score} for hit in hits] for hits in found]
    answer = retrieve(app, queries=["Rome", "zzz", "capital"], topk=2, return_scores=True)
    assert answer == Answer(200, {"result": expected})
    assert [len(hits) for hits in expected] == [1, 0, 2]


@pytest.mark.parametrize(
    "fields",
    [{}, {"topk": None}, {"topk": 3, "return_scores": False}, {"return_scores": None}, {"user": "unknown"}],
)
def test_bare_documents_and_three_of_them_by_default(app, index, fields):
    expected = [document(hit) for hit in index.search_batch(["capital twin stars"], 3)[0]]
    assert len(expected) == 3
    assert retrieve(app, queries=["capital twin stars"], **fields) == Answer(200, {"result": [expected]})


def test_no_query_gives_no_result(app):
    assert retrieve(app, queries=[]) == Answer(200, {"result": []})


@pytest.mark.parametrize("query", ["", "\ud800", "\x00", '" OR 1', "x" * 20])
def test_any_query_within_the_limits_is_served(app, query):
    assert retrieve(app, queries=[query, "Rome"]).body["result"][1][0]["id"] == "it"


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"queries": ["a"] * 4}, "queries: List should have at most 3 items .*, got .*"),
        ({"queries": ["a", "b" * 21]}, r"queries\[1\]: String should have at most 20 characters, got 'b{21}'"),
        ({"queries": ["b" * 900]}, r"queries\[0\]: String should have at most 20 characters, got 'b{76}\.\.\."),
        ({"queries": ["a"], "topk": 0}, "topk: Input should be greater than or equal to 1, got 0"),
        ({"queries": ["a"], "topk": 6}, "topk: Input should be less than or equal to 5, got 6"),
        ({"queries": ["a"], "topk": "many"}, "topk: Input should be a valid integer.*, got 'many'"),
        ({"queries": ["a"], "return_scores": 7}, "return_scores: Input should be a valid boolean.*, got 7"),
        ({"queries": "a"}, "queries: Input should be a valid list, got 'a'"),
        ({"queries": [1]}, r"queries\[0\]: Input should be a valid string, got 1"),
        ({"topk": 6}, r"queries: Field required, got .*; topk: Input should be less .*"),
    ],
)
def test_a_request_outside_the_limits_names_the_field_and_the_range(app, fields, detail):
    answer = retrieve(app, **fields)
    assert answer.status == 422
    assert re.fullmatch(detail, answer.body["detail"])


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"\xff"])
def test_a_body_that_is_no_request_is_refused(app, body):
    answer = ask(app, [body])
    assert answer.status in (400, 422)
    assert answer.body["detail"]


def padded(length):
    """A valid request of exactly so many bytes."""
    body = json.dumps({"queries": ["Rome"]}).encode()
    return body + b" " * (length - len(body))


def cut(body, size):
    return [body[i : i + size] for i in range(0, len(body), size)]


@pytest.mark.parametrize("size", [7, 10_000])
def test_a_request_of_the_greatest_size_is_served_and_one_byte_more_refused(app, size):
    assert ask(app, cut(padded(1000), size)).status == 200
    assert ask(app, cut(padded(1001), size)) == Answer(
        413, {"detail": "the request must have at most 1000 bytes, got 1001"}
    )


def test_health(app, index):
    expected = {"status": "ok", "engine": "bm25", "documents": 7, "identity": index.identity}
    assert ask(app, [], path="/health", method="GET") == Answer(200, expected)


def test_an_unknown_path_and_a_wrong_method_are_refused(app):
    assert ask(app, [], path="/search").status == 404
    assert ask(app, [], method="GET").status == 405


def test_a_slow_search_does_not_hold_up_another():
    """Each of two searches waits for the other to begin."""
    both = threading.Barrier(2, timeout=20)

    class Slow:
        engine, identity = "slow", "slow-1"

        def __len__(self):
            return 1

        def search_batch(self, queries, k):
            both.wait()
            return [[] for _ in queries]

    app = create_app(Slow())
    body = json.dumps({"queries": ["a"]}).encode()

    async def ask_once():
        scope = {"type": "http", "method": "POST", "path": "/retrieve", "query_string": b"", "http_version": "1.1"}
        sent = []

        async def receive():
            return {"type": "http.request", "body": body}

        async def send(message):
            sent.append(message)

        await app(scope | {"headers": [(b"content-type", b"application/json")]}, receive, send)
        return sent[0]["status"]

    async def ask_twice():
        return await asyncio.gather(ask_once(), ask_once())

    assert asyncio.run(ask_twice()) == [200, 200]


def test_without_fastapi_the_error_says_what_to_install(index, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(ImportError, match=r"pip install 'sorl-trl\[serve\]'"):
        create_app(index)
