"""The interface of search engines, their two kinds of failure, how long to retry, and checks of what passes."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from http.client import BadStatusLine, IncompleteRead
from typing import Annotated, Any, Protocol

import tenacity

from sorl_trl.checks import POSITIVE_COUNT, SECONDS, check_fields
from sorl_trl.types import Passage

logger = logging.getLogger(__name__)


class SearchError(Exception):
    """The engine works but refuses this request. The policy is told so and may ask differently.

    A single query can make the engine refuse a whole batch; ask query by query to find out which.
    """


class SearchUnavailable(Exception):
    """The engine cannot be reached or is broken. This says nothing about the policy, so its trajectory is masked out.

    It is not a `SearchError`, so that no handler of one catches the other. Any other exception is a programming error.
    """


_DOWN = (
    *(SearchUnavailable, ConnectionError, TimeoutError, asyncio.TimeoutError, socket.gaierror),
    *(ssl.SSLEOFError, ssl.SSLZeroReturnError, IncompleteRead, BadStatusLine, asyncio.IncompleteReadError),
)
_UNREACHABLE = {errno.EADDRNOTAVAIL, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH}
_CLIENTS = ("aiohttp", "grpc", "httpcore", "httpx", "requests", "urllib", "websocket", "websockets")
"""Packages, in any version, whose own errors mean "down" by the names below."""
_LOST_CONNECTION = {
    *("RemoteProtocolError", "ReadError", "WriteError", "CloseError"),  # httpx, httpcore
    *("ChunkedEncodingError", "ServerDisconnectedError", "ClientPayloadError"),  # requests, aiohttp
    *("ContentTooShortError", "FutureTimeoutError"),  # urllib, grpc
    *("WebSocketConnectionClosedException", "WebSocketTimeoutException"),  # websocket-client
}
_REFUSED = {1003, 1007, 1008, 1009, 1010}
"""Codes of WebSocket servers that refuse what they were sent; those from 3000 on are the application's."""
_RESPONSE_ATTRIBUTES = ("response", "status", "status_code")
"""Attributes with which clients pass on that a server has answered."""
_MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, SyntaxError, TypeError),
    SearchError,
)
"""Errors that mean what they say, whatever was being handled when they were raised."""


def is_down(error: BaseException | None) -> bool:
    """Whether an error means that a service cannot be reached, or that the connection to it is lost.

    It does if it is `SearchUnavailable`, one of Python's errors for that, or a known client's, and if one of these
    caused it or was being handled when it was raised, however deep. `raise … from None` hides what was handled. A
    group is down if all its members are.

    An answer of a server, such as HTTP 404, is not "down", nor is a mistake of the program, such as a KeyError, even
    where it is made while a lost connection is handled. Other kinds of OSError, such as a missing file, are mistakes
    in the setup.
    """
    seen = set[int]()
    while isinstance(error, Exception) and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, _DOWN) or _is_unreachable(error) or _has_lost_connection(error):
            return True
        if isinstance(members := getattr(error, "exceptions", None), tuple):  # a group, of Python 3.11 or of a package
            return all(map(is_down, members))
        if isinstance(error, _MISTAKES) or any(
            getattr(error, name, None) is not None for name in _RESPONSE_ATTRIBUTES
        ):
            return False
        is_hidden = error.__suppress_context__ and _package(type(error)) not in _CLIENTS  # httpcore hides its reasons
        error = error.__cause__ or (None if is_hidden else error.__context__)
    return False


def _is_unreachable(error: Exception) -> bool:
    """Whether Python found no way to a host, for which it has no class of errors."""
    if not isinstance(error, OSError):
        return False
    if error.errno is None:
        # asyncio joins the texts of its attempts, as for both addresses of localhost, and drops their kinds.
        return str(error).startswith("Multiple exceptions: [Errno")
    return error.errno in _UNREACHABLE


def _has_lost_connection(error: Exception) -> bool:
    """Whether a known client's error says that its connection was lost."""
    names = {kind.__name__ for kind in type(error).__mro__ if _package(kind) in _CLIENTS}
    if "RpcError" in names:
        status = error.code() if hasattr(error, "code") else None
        return getattr(status, "name", None) in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    if "ConnectionClosed" in names:
        code: int = getattr(getattr(error, "rcvd", None), "code", 1006)  # 1006: without a word
        return code < 3000 and code not in _REFUSED
    return bool(names) and (not names.isdisjoint(_LOST_CONNECTION) or isinstance(error.__cause__, EOFError))


def _package(kind: type) -> str:
    """The package that defines a class, without the version that some carry in their names."""
    return kind.__module__.partition(".")[0].rstrip("0123456789")


@dataclass(frozen=True)
class RetryPolicy:
    """How long to retry an engine that is down. Waits grow exponentially, with jitter, up to `max_wait_s`.

    By default, the deadline ends the retries, which leaves time to restart a server. It bounds attempts and waits
    together: no attempt begins after it. The engine itself limits the time of one attempt. The values are our choice.
    Raises ValueError if a value is out of range.
    """

    attempts: Annotated[int, POSITIVE_COUNT] = 30
    initial_wait_s: Annotated[float, SECONDS] = 0.5
    max_wait_s: Annotated[float, SECONDS] = 10.0
    deadline_s: Annotated[float, SECONDS] = 60.0

    def __post_init__(self) -> None:
        check_fields(self)

    def retrying(self, patient: bool = True) -> tenacity.Retrying:
        """An object that repeats a call while it raises that a service is down; only one call unless `patient`."""
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
    """A `SearchBackend` that never finds anything, so that a policy must know or guess its answers."""

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
