"""The interface of search engines, their two kinds of failure, retries, and checks of requests and results."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from http.client import IncompleteRead
from typing import Annotated, Any, Protocol
from urllib.error import URLError

import tenacity

from sorl_trl.checks import POSITIVE_COUNT, SECONDS, Checked
from sorl_trl.types import Passage

logger = logging.getLogger(__name__)


class SearchError(Exception):
    """The engine works but refuses this request. The policy reads the refusal and may ask differently.

    A single query can make the engine refuse a whole batch; repeat query by query to find out which.
    """


class SearchUnavailable(Exception):
    """The engine cannot be reached or is broken. This is not the policy's fault, so the trajectory is masked out.

    It is not a `SearchError`, so handlers of one do not catch the other. Any other exception is a programming error.
    """


_DOWN = (
    *(SearchUnavailable, ConnectionError, TimeoutError, asyncio.TimeoutError, socket.gaierror),
    *(IncompleteRead, ssl.SSLEOFError),
)
_MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, SyntaxError, TypeError),
    *(SearchError, FileNotFoundError, PermissionError, ssl.SSLCertVerificationError),
)
"""Errors of code or setup, regardless of any error that was being handled when they were raised."""
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_DOWN_BY_NAME = {
    *("NetworkError", "RemoteProtocolError", "TimeoutException"),  # httpx, whose ConnectError is a NetworkError
    *("ConnectionError", "ChunkedEncodingError", "Timeout"),  # requests
    *("ClientConnectionError", "ClientPayloadError"),  # aiohttp
}
"""Names of the classes with which clients report an unreachable service or a lost connection."""


def is_down(error: BaseException | None) -> bool:
    """Whether an error means that a service cannot be reached or that the connection to it was lost.

    It does if it is `SearchUnavailable`, one of Python's errors for that, or one of a known client's, or if one of
    these caused it or was being handled when it was raised, at any depth. `raise … from None` hides a handled error. A
    mistake in code or setup, such as a `KeyError` or a wrong certificate, does not count as down, regardless of
    handled errors. Neither does a server's answer, such as HTTP 404.
    """
    for each in causes(error):
        reason = each.reason if isinstance(each, URLError) else None
        if isinstance(each, _MISTAKES) or isinstance(reason, _MISTAKES):
            return False
        names = {kind.__name__ for kind in type(each).__mro__}
        if isinstance(each, _DOWN) or names & _DOWN_BY_NAME or isinstance(reason, OSError):
            return True
        if isinstance(each, OSError) and each.errno in _NO_ROUTE:
            return True
    return False


def causes(error: BaseException | None) -> Iterator[Exception]:
    """An error, what caused it or was being handled when it was raised, and so on."""
    seen = set[int]()
    while isinstance(error, Exception) and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@dataclass(frozen=True)
class RetryPolicy(Checked):
    """How long to retry an engine that is down. Waits grow exponentially, with jitter, up to `max_wait_s`.

    By default, retries end at the deadline, which leaves time to restart a server. It bounds attempts and waits in
    total: no attempt begins after it. The engine itself limits the time of one attempt. The values are our choice.
    Raises ValueError if a value is out of range.
    """

    attempts: Annotated[int, POSITIVE_COUNT] = 30
    initial_wait_s: Annotated[float, SECONDS] = 0.5
    max_wait_s: Annotated[float, SECONDS] = 10.0
    deadline_s: Annotated[float, SECONDS] = 60.0

    def retrying(self, patient: bool = True) -> tenacity.Retrying:
        """An object that repeats a call while its error means that a service is down; only one call unless
        `patient`."""
        attempts = tenacity.stop_after_attempt(self.attempts if patient else 1)
        return tenacity.Retrying(
            stop=attempts | tenacity.stop_before_delay(self.deadline_s),
            wait=tenacity.wait_random_exponential(multiplier=self.initial_wait_s, max=self.max_wait_s),
            retry=tenacity.retry_if_exception(is_down),
            before_sleep=tenacity.before_sleep_log(logger, logging.INFO),
            reraise=True,
        )


class SearchBackend(Protocol):
    """The interface of a search engine: one method, which must accept any query.

    With an attribute `thread_safe = True`, several threads may call it at the same time; without it, only one does.
    """

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Search for several queries at once.

        Args:
            queries: Any text, as a policy wrote it. No query may crash the engine; a query without hits gives `[]`.
            k: The most passages per query, at least 1.

        Returns:
            One list of passages per query, in the order of `queries`, each with the best passage first.

        Raises:
            SearchError: The engine refuses this request.
            SearchUnavailable: The engine cannot serve any request now.
            ValueError: `k` is below 1.
        """
        ...


class NoSearch:
    """A `SearchBackend` that never finds anything, so the policy must know or guess its answers."""

    thread_safe = True

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`."""
        check_request(queries, k)
        return [[] for _ in queries]


def is_thread_safe(backend: SearchBackend) -> bool:
    """Whether the engine allows several threads to call it at the same time."""
    return bool(getattr(backend, "thread_safe", False))


def check_request(queries: Sequence[str], k: int) -> None:
    """Raise `ValueError` if `k` is below 1, and `TypeError` for a string instead of a sequence of strings."""
    POSITIVE_COUNT.check("k", k)
    if isinstance(queries, str):
        raise TypeError(f"queries must be a sequence of strings, got the string {queries!r}")


def checked_results(results: Any, queries: Sized) -> list[list[Passage]]:
    """The passages of each query. Raises `RuntimeError` if a backend returns anything else, or loses a query."""
    try:
        found = [list(passages) for passages in results]
        are_passages = all(isinstance(passage, Passage) for passages in found for passage in passages)
    except TypeError:
        are_passages = False
    if not are_passages:
        raise RuntimeError(f"search_batch must return a list of `Passage` for each query, got {repr(results)[:200]}")
    if len(found) != len(queries):
        raise RuntimeError(f"search_batch returned {len(found)} results for {len(queries)} queries")
    return found
