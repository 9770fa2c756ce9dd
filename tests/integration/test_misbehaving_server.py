"""A collector over a real server that misbehaves on purpose: nothing is lost, and nothing is blamed on the policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from sorl_trl.rollout import Collector, RetryPolicy, SearchResponder, TagProtocol, assemble
from sorl_trl.rollout.trajectories import rollout_statistics
from sorl_trl.search.client import HTTPSearch
from sorl_trl.search.wire import MalformedResponse
from sorl_trl.types import Trajectory
from tests.unit.rollout.fakes import ScriptedGenerator, said, word_tokenizer
from tests.unit.search.servers import Reply, Server, echo

QUERY = "capital of France"
SEARCH = said(f"<search> {QUERY} </search>")
ANSWER = said("<answer> Paris </answer>")
PROTOCOL = TagProtocol(passage_template="{text}", no_results="No", search_failed="I", invalid_feedback="I should")


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
        Reply(b'{"result": [[', headers={"Content-Length": "1000", "Connection": "close"}),
        Reply(b"not gzip", headers={"Content-Encoding": "gzip"}),
    ],
    ids=["broken off", "no gzip"],
)
def test_a_server_in_trouble_masks_who_waits_for_it(server: Server, reply: Reply) -> None:
    server.reply = lambda _: reply
    assert_masked(collect(server.url))
    assert len(server.requests) == 4


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


def test_a_server_of_another_kind_ends_the_run_with_its_words(server: Server) -> None:
    server.reply = lambda _: Reply(b'{"result": []}')
    with pytest.raises(MalformedResponse, match=r"0 results for 1 queries.*the response begins"):
        collect(server.url)
    assert len(server.requests) == 1, "no retry mends it"
