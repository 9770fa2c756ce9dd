"""Engines that are down: which errors mean it, and how long one is waited for."""

from __future__ import annotations

import errno
from http.client import IncompleteRead
from itertools import pairwise
from urllib.error import HTTPError, URLError

import httpx2
import pytest
import requests
from tests.unit.rollout.fakes import PARIS, FakeSearch

from sorl_trl.search import RetryPolicy, SearchError, SearchUnavailable
from sorl_trl.search.backend import is_down

NO_WAIT = RetryPolicy(attempts=3, initial_wait_s=0)
DOWN = SearchUnavailable("down")


def test_an_engine_that_recovers_is_waited_for() -> None:
    backend = FakeSearch([DOWN, ConnectionError("reset")])
    assert NO_WAIT.retrying()(backend.search_batch, ["a", "bc"], 3) == [[PARIS], [PARIS]]
    assert backend.calls == [["a", "bc"]] * 3


@pytest.mark.parametrize(
    ("error", "patient", "attempts"),
    [(DOWN, True, 3), (DOWN, False, 1), (SearchError("refused"), True, 1), (FileNotFoundError("index"), True, 1)],
)
def test_an_engine_that_stays_down_is_given_up_and_a_mistake_is_not_repeated(
    error: Exception, patient: bool, attempts: int
) -> None:
    backend = FakeSearch([error] * 9)
    with pytest.raises(type(error)) as caught:
        NO_WAIT.retrying(patient)(backend.search_batch, ["a"], 3)
    assert caught.value is error
    assert backend.calls == [["a"]] * attempts


def caused(*errors: BaseException) -> BaseException:
    """The last of some errors, each raised `from` the one before."""
    for cause, error in pairwise(errors):
        error.__cause__ = cause
    return errors[-1]


def handled(*errors: BaseException) -> BaseException:
    """The last of some errors, each raised while the one before was handled."""
    for handled, error in pairwise(errors):
        error.__context__ = handled
    return errors[-1]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (httpx2.ConnectError("refused"), True),
        (httpx2.ReadTimeout("late"), True),
        (httpx2.RemoteProtocolError("Server disconnected without sending a response."), True),
        (requests.exceptions.ReadTimeout(), True),
        (URLError(OSError(errno.EHOSTUNREACH, "No route to host")), True),
        (type("ServerDisconnectedError", (type("ClientConnectionError", (Exception,), {}),), {})(), True),
        (HTTPError("http://x", 404, "Not Found", {}, None), False),  # type: ignore[arg-type]
        (URLError(FileNotFoundError(errno.ENOENT, "No such file")), False),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), True),
        (IncompleteRead(b""), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_lost_connection_is_down_and_an_answer_is_not(error: Exception, expected: bool) -> None:
    assert is_down(error) == expected


@pytest.mark.parametrize("first", [ConnectionResetError("gone"), TimeoutError("late"), SearchUnavailable("down")])
def test_what_a_lost_connection_caused_is_down_however_deep(first: Exception) -> None:
    assert is_down(caused(first, OSError("inner"), RuntimeError("no judge")))
    assert is_down(handled(first, ValueError("inner"), RuntimeError("no judge")))
    assert not is_down(handled(first, KeyboardInterrupt())), "or it would be retried"
    hidden = handled(first, ValueError("is told"))
    hidden.__suppress_context__ = True
    assert not is_down(hidden), "raised `from None`"
    assert not is_down(handled(first, KeyError("typo"))), "a mistake in code ends the run"
    assert not is_down(caused(first, SearchError("refused"))), "the policy is told"


def test_errors_that_caused_each_other_are_followed_once() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_down(first)
