"""The client of a search server."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx2

from sorl_trl.checks import POSITIVE_COUNT, Number, check_choice, check_number
from sorl_trl.search.backend import SearchError, SearchUnavailable
from sorl_trl.search.checks import check_request
from sorl_trl.search.server.wire import EXCERPT_LENGTH, REQUEST_FORMATS, MalformedResponse, parse_response
from sorl_trl.text import encodable, without_user
from sorl_trl.types import Passage

WORTH_RETRYING = (408, 429)
"""Refusals that mean "later": beside any HTTP 5xx, they say nothing about the request."""
REFUSED = (400, 413, 414, 422)
"""Refusals of what this request says. Others (no such path, not allowed) would meet every request alike."""


class HTTPSearch:
    """A `SearchBackend` that asks a Search-R1 `/retrieve` server, or one of its variants, over pooled connections.

    It tries once: put `RetryingSearch` and `CircuitBreaker` around it. A query with half of a surrogate pair is sent
    with U+FFFD in its place. Threads may share it; a copy, by fork or by pickle, opens connections of its own.

    Args:
        url: Where to POST, with its path: `http://127.0.0.1:8000/retrieve`. A server that asks for a user and a
            password has them from `http://user:password@…`; no message shows them.
        request: How the server wants to be asked: a name in `REQUEST_FORMATS`.
        timeout_s: For connecting, for each wait for bytes, and for the whole of one response.
        batch_size: The most queries per request. Formats that hold one query send one, whatever this says.
        concurrency: The most requests at a time that one call of `search_batch` makes.
        max_response_bytes: A longer response is not read to its end, and is an error.

    Raises:
        ValueError: An argument is out of range; later, as MalformedResponse, the server is not what it should be.
    """

    thread_safe = True

    def __init__(
        self,
        url: str,
        request: str = "search_r1",
        timeout_s: float = 30.0,
        batch_size: int = 64,
        concurrency: int = 8,
        max_response_bytes: int = 64 << 20,
    ) -> None:
        if refusal := url_refusal(url):
            raise ValueError(refusal)
        check_choice("request", request, REQUEST_FORMATS)
        check_number("timeout_s", timeout_s, Number(above=0, finite=False))
        limits = {"batch_size": batch_size, "concurrency": concurrency, "max_response_bytes": max_response_bytes}
        for name, value in limits.items():
            check_number(name, value, POSITIVE_COUNT)
        self._arguments = (url, request, timeout_s, batch_size, concurrency, max_response_bytes)
        self._url, self._shown_url = url, without_user(url)
        self._format = REQUEST_FORMATS[request]
        self._timeout_s = timeout_s
        self._batch_size = 1 if self._format.single else batch_size
        self._concurrency = concurrency
        self._max_response_bytes = max_response_bytes
        self._clients: dict[int, httpx2.Client] = {}

    def __reduce__(self) -> tuple[type[HTTPSearch], tuple[object, ...]]:
        """A copy makes a client of its own: connections cannot be copied."""
        return HTTPSearch, self._arguments

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Raises `MalformedResponse` where the server is not what it should be."""
        check_request(queries, k)
        batches = [queries[i : i + self._batch_size] for i in range(0, len(queries), self._batch_size)]
        if len(batches) <= 1:
            return [passages for batch in batches for passages in self._ask(batch, k)]
        with ThreadPoolExecutor(min(self._concurrency, len(batches))) as pool:
            return [passages for results in pool.map(self._ask, batches, [k] * len(batches)) for passages in results]

    def _ask(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        request = json.dumps(self._format.body([encodable(query) for query in queries], k)).encode()
        try:
            response, body = self._post(request)
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise SearchUnavailable(f"{self._shown_url}: {error!r}") from error
        self._check_status(response, body)
        if len(body) > self._max_response_bytes:
            raise MalformedResponse(
                f"{self._shown_url}: the response is longer than max_response_bytes={self._max_response_bytes}",
                _text(body),
            )
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise SearchUnavailable(
                f"{self._shown_url}: the response is not JSON ({error}): {_text(body)!r}"
            ) from error
        return parse_response(answer, len(queries), k, self._format.single)

    def _post(self, request: bytes) -> tuple[httpx2.Response, bytes]:
        """The response, and its body up to the first block that goes over the limit."""
        deadline = time.monotonic() + self._timeout_s
        body = bytearray()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        with self._client().stream("POST", self._url, content=request, headers=headers) as response:
            for block in response.iter_bytes():
                body += block
                if len(body) > self._max_response_bytes:
                    break
                if time.monotonic() > deadline:
                    raise httpx2.ReadTimeout(f"the response took longer than timeout_s={self._timeout_s}")
        return response, bytes(body)

    def _client(self) -> httpx2.Client:
        """This process's client: connections that a fork inherits are the parent's to use."""
        process = os.getpid()
        if process not in self._clients:
            # Two threads may both get here; `setdefault` leaves them with one client.
            self._clients.setdefault(process, httpx2.Client(timeout=self._timeout_s))
        return self._clients[process]

    def _check_status(self, response: httpx2.Response, body: bytes) -> None:
        status = f"{self._shown_url}: HTTP {response.status_code}"
        if response.is_server_error or response.status_code in WORTH_RETRYING:
            raise SearchUnavailable(f"{status}: {_text(body)!r}")
        if response.status_code in REFUSED:
            raise SearchError(f"{status}: {_text(body)!r}")
        if response.is_redirect:
            raise MalformedResponse(f"{status} to {response.headers.get('Location')!r}: give that URL", _text(body))
        if not response.is_success:
            raise MalformedResponse(status, _text(body))


def server_identity(url: str, timeout_s: float = 5.0) -> str | None:
    """Ask a server what its index is called: `health` beside `url` tells it, if the server is of this package.

    Asked once. `None` where the server does not know the question, says no identity, or is down.
    """
    try:
        response = httpx2.get(httpx2.URL(url).join("health"), timeout=timeout_s)
        health = response.json() if response.is_success else None
    except (httpx2.HTTPError, ValueError, RecursionError):
        return None
    identity = health.get("identity") if isinstance(health, dict) else None
    return identity if isinstance(identity, str) and identity else None


def url_refusal(url: str) -> str | None:
    """Why it is no URL of something on a server, None if it is one: without a path it answers no search."""
    shown = without_user(url)
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        return f"url must be an http or https URL, got {shown!r} ({error})"
    if parsed.scheme not in ("http", "https") or not parsed.host:
        return f"url must be an http or https URL, got {shown!r}"
    if parsed.path == "/":
        hint = without_user(str(parsed.join("/retrieve")))
        return f"url must have the path of the search, such as {hint}, got {shown!r}"
    return None


def _text(body: bytes) -> str:
    return body[: 4 * EXCERPT_LENGTH].decode("utf-8", "replace")[:EXCERPT_LENGTH]
