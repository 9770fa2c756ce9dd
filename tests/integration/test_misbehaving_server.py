"""A collector over a real server that misbehaves on purpose: nothing is lost, and nothing is blamed on the policy."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from sorl_trl.rollout import Collector, RetryPolicy, SearchResponder, TagProtocol, assemble
from sorl_trl.rollout.trajectories import rollout_statistics
from sorl_trl.search.client import HTTPSearch
from sorl_trl.search.wire import MalformedResponse
from sorl_trl.types import Trajectory
from tests.unit.rollout.fakes import PARIS, ScriptedGenerator, said, word_tokenizer
from tests.unit.search.servers import Reply, Server, echo, result

QUERY = "capital of France"
SEARCH = said(f"<search> {QUERY} </search>")
ANSWER = said("<answer> Paris </answer>")
PROTOCOL = TagProtocol(passage_template="{text}", no_results="No", search_failed="I", invalid_feedback="I should")
FOUND = {"id": PARIS.id, "title": PARIS.title, "text": PARIS.text}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with closing(Server()) as server:
        yield server


def collect(url: str, **options: Any) -> list[Trajectory]:
    """One row that searches and then answers, one that answers at once."""
    retry = RetryPolicy(attempts=4, initial_wait_s=0)
    collector = Collector(
        word_tokenizer(), SearchResponder(HTTPSearch(url, **options), PROTOCOL, retry=retry), PROTOCOL
    )
    return collector.collect([(11,), (12,)], ScriptedGenerator({11: [SEARCH, ANSWER], 12: [ANSWER]}))


def assert_masked(trajectories: list[Trajectory]) -> None:
    """The one that searched is there, is masked and is counted; the other is untouched."""
    assert [trajectory.stop_reason.value for trajectory in trajectories] == ["search_unavailable", "answered"]
    assert [any(row.env_mask) for row in assemble(trajectories)] == [False, True]
    statistics = rollout_statistics(trajectories)
    assert (statistics["masked_share"], statistics["stop_reason/search_unavailable"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(b"out of memory", 500),
        Reply(b"starting", 503),
        Reply(b"later", 429, {"Retry-After": "3600"}),
        Reply(b"<html>login</html>"),
        Reply(b""),
        Reply(b'{"result": [[', headers={"Content-Length": "1000", "Connection": "close"}),
        Reply(b'{"result": [[', headers={"Content-Length": "1000"}, reset=True),
        Reply(b"not gzip", headers={"Content-Encoding": "gzip"}),
    ],
    ids=["500", "503", "429", "html", "empty", "broken off", "reset", "no gzip"],
)
def test_a_server_in_trouble_masks_who_waits_for_it(server: Server, reply: Reply) -> None:
    server.reply = lambda _: reply
    assert_masked(collect(server.url))
    assert len(server.requests) == 4


def test_nobody_listens(server: Server) -> None:
    server.close()
    assert_masked(collect(server.url))


def test_a_server_that_is_too_slow(server: Server) -> None:
    released = threading.Event()
    server.reply = lambda request: Reply(echo(request).body, pause=released.wait)
    assert_masked(collect(server.url, timeout_s=0.05))
    released.set()


def test_a_server_that_recovers_in_time_costs_nothing(server: Server) -> None:
    """An error, a connection that is reset, a refusal that means later; `Retry-After` is not waited for."""
    troubles = [Reply(b"", 500), Reply(b"{", reset=True), Reply(b"", 429, {"Retry-After": "3600"})]
    server.reply = lambda request: troubles.pop(0) if troubles else echo(request)
    trajectories = collect(server.url)
    assert [trajectory.answer for trajectory in trajectories] == ["Paris", "Paris"]
    assert rollout_statistics(trajectories)["masked_share"] == 0
    assert len(server.requests) == 4


def test_a_refused_query_is_told_to_the_policy(server: Server) -> None:
    server.reply = lambda _: Reply(b'{"detail": "too long"}', 422)
    searched, _ = collect(server.url)
    assert [segment.text for segment in searched.segments][1] == "<information> I </information>"
    assert searched.answer == "Paris"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"result": []}, "0 results for 1 queries"),
        ({"result": [[], []]}, "2 results for 1 queries"),
        ({"result": {"documents": []}}, "no list `result`"),
        ([], "no list `result`"),
        ({"result": [[{"document": {"body": "?"}}]]}, "a passage needs"),
        ({"result": [[7]]}, "a hit must be"),
    ],
)
def test_a_server_of_another_kind_ends_the_run_with_its_words(server: Server, answer: object, problem: str) -> None:
    server.reply = lambda _: Reply(json.dumps(answer).encode())
    with pytest.raises(MalformedResponse, match=f"{problem}.*the response begins"):
        collect(server.url)
    assert len(server.requests) == 1, "no retry mends it"


def documents() -> dict[str, Callable[[], Reply]]:
    contents = f'"{PARIS.title}"\n{PARIS.text}'
    hits: dict[str, object] = {
        "nested": {"document": FOUND, "score": 1.0},
        "nested, without a score": {"document": FOUND},
        "flat": FOUND | {"score": 1.0},
        "a score in words": FOUND | {"score": "high"},
        "string": contents,
        "pair": [contents, 1.0],
        "after a null": {"document": {"contents": contents}},
    }
    replies = {name: (lambda hit=hit: result([[hit]])) for name, hit in hits.items()}
    return replies | {"after a null": lambda: result([[{"document": None}, hits["after a null"]]])}


@pytest.mark.parametrize("name", documents())
def test_documents_of_every_kind_are_read(server: Server, name: str) -> None:
    server.reply = lambda _: documents()[name]()
    searched, _ = collect(server.url)
    assert [segment.text for segment in searched.segments][1] == f"<information> {PARIS.text} </information>"
    assert [passage.title for passage in searched.observations[0].passages] == [PARIS.title]
