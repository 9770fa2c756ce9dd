"""The interface of search engines, their two kinds of failure, and checks of requests and results."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence, Sized
from http.client import BadStatusLine, IncompleteRead
from typing import Any, Protocol

from sorl_trl.checks import POSITIVE_COUNT
from sorl_trl.types import Passage


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
    *(ssl.SSLEOFError, ssl.SSLZeroReturnError, IncompleteRead, BadStatusLine),
)
_CLIENTS = ("aiohttp", "httpcore", "httpx", "requests", "urllib")
"""Packages, in any version, whose own errors mean "down" if one of `_DOWN` caused them, or by these names."""
_BROKEN_OFF = {
    *("RemoteProtocolError", "ReadError", "WriteError", "CloseError"),  # httpx, httpcore
    *("ChunkedEncodingError", "ServerDisconnectedError", "ClientPayloadError"),  # requests, aiohttp
}


def is_down(error: BaseException | None) -> bool:
    """Whether an error means that a service cannot be reached: `SearchUnavailable`, Python's, or an HTTP client's.

    Other kinds of OSError, such as a missing file, are mistakes in the setup.
    """
    if isinstance(error, _DOWN):
        return True
    if error is None or type(error).__module__.partition(".")[0].rstrip("0123456789") not in _CLIENTS:
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    return not names.isdisjoint(_BROKEN_OFF) or is_down(error.__cause__ or error.__context__)


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
        found = [list(each) for each in results]
        are_passages = all(isinstance(passage, Passage) for each in found for passage in each)
    except TypeError:
        are_passages = False
    if not are_passages:
        raise RuntimeError(f"search_batch must return a list of `Passage` for each query, got {repr(results)[:200]}")
    if len(found) != len(queries):
        raise RuntimeError(
            f"search_batch returned {len(found)} results for {len(queries)} queries: it must return one each"
        )
    return found
