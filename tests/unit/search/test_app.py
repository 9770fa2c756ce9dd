"""The web application by itself: what it answers and refuses, asked over ASGI without a socket."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass

import pytest

from sorl_trl.search.app import create_app


@dataclass(frozen=True)
class Answer:
    status: int
    body: dict


async def ask(app, body: bytes) -> Answer:
    headers = [(b"content-type", b"application/json"), (b"host", b"test")]
    scope = {"type": "http", "method": "POST", "path": "/retrieve", "raw_path": b"/retrieve", "query_string": b""}
    pending = [{"type": "http.request", "body": body}]
    sent = []

    async def receive():
        return pending.pop(0) if pending else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope | {"headers": headers, "http_version": "1.1", "scheme": "http"}, receive, send)
    return Answer(sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent)))


def retrieve(app, **fields) -> Answer:
    return asyncio.run(ask(app, json.dumps(fields).encode()))


@pytest.fixture(scope="module")
def app(index):
    return create_app(index)


def document(passage):
    contents = f'"{passage.title}"\n{passage.text}'
    return {"id": passage.id, "title": passage.title, "text": passage.text, "contents": contents}


@pytest.mark.parametrize(
    "fields", [{}, {"topk": None}, {"topk": 3, "return_scores": False}, {"return_scores": None}, {"user": "unknown"}]
)
def test_bare_documents_and_three_of_them_by_default(app, index, fields):
    expected = [document(hit) for hit in index.search_batch(["capital twin stars"], 3)[0]]
    assert len(expected) == 3
    assert retrieve(app, queries=["capital twin stars"], **fields) == Answer(200, {"result": [expected]})


@pytest.mark.parametrize("query", ["", "\ud800", "\x00", '" OR 1', "x" * 10_000])
def test_any_query_within_the_limits_is_served(app, query):
    assert retrieve(app, queries=[query, "Rome"]).body["result"][1][0]["id"] == "it"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"queries": ["a"] * 4097}, ["queries"]),
        ({"queries": ["a", "b" * 10_001]}, ["queries", 1]),
        ({"queries": ["a"], "topk": 0}, ["topk"]),
        ({"queries": ["a"], "topk": 101}, ["topk"]),
        ({"queries": ["a"], "topk": "many"}, ["topk"]),
        ({"queries": "a"}, ["queries"]),
        ({"topk": 101}, ["queries"]),
    ],
)
def test_a_request_outside_the_limits_names_the_field(app, fields, place):
    answer = retrieve(app, **fields)
    assert answer.status == 422
    assert answer.body["detail"][0]["loc"] == ["body", *place]


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

    async def ask_twice():
        return await asyncio.gather(*(ask(app, b'{"queries": ["a"]}') for _ in range(2)))

    assert [answer.status for answer in asyncio.run(ask_twice())] == [200, 200]
