"""A client for Search-R1's `/retrieve`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import httpx2

from sorl_trl.checks import Number
from sorl_trl.search.backend import SearchError, SearchUnavailable, check_request
from sorl_trl.search.corpus import title_and_text
from sorl_trl.text import encodable, without_user
from sorl_trl.types import Passage

EXCERPT_LENGTH = 200
WORTH_RETRYING = (408, 429)
"""HTTP codes that mean "later". Like any 5xx, they are unrelated to the request's content."""
REFUSED = (400, 413, 414, 422)
"""HTTP codes that refuse this request. Others, such as "not found", would refuse any request."""


class MalformedResponse(ValueError):
    """The server's answer is not a search result, so this is the wrong server.

    Retries cannot fix this mistake in the setup. It is neither a `SearchError` nor a `SearchUnavailable`, so it ends
    the run.
    """


class HTTPSearch:
    """A `SearchBackend` that queries a Search-R1 `/retrieve` server over pooled connections.

    It sends the queries in one request, once; rollouts retry. A lone surrogate in a query is sent as U+FFFD. Threads
    may share it.

    Args:
        url: The URL to POST to, including the path: `http://127.0.0.1:8000/retrieve`. User and password can be given
            as `http://user:password@…`; messages do not show them.
        timeout_s: Seconds for connecting, and for each wait for bytes.

    Raises:
        ValueError: An argument is out of range or, in a search, the server is the wrong one (MalformedResponse).
    """

    thread_safe = True

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        _check_url(url)
        Number(above=0).check("timeout_s", timeout_s)
        self._url, self._shown_url = url, without_user(url)
        self._client = httpx2.Client(timeout=timeout_s)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Raises `MalformedResponse` if the answer is not a search result."""
        check_request(queries, k)
        if not queries:
            return []
        # Without scores, Search-R1's server answers HTTP 500, or returns wrong rows for exactly two queries.
        asked = {"queries": [encodable(query) for query in queries], "topk": k, "return_scores": True}
        request = json.dumps(asked).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        try:
            response = self._client.post(self._url, content=request, headers=headers)
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise SearchUnavailable(f"{self._shown_url}: {error!r}") from error
        self._check_status(response)
        try:
            answer = json.loads(response.content)
        except (ValueError, RecursionError) as error:
            raise SearchUnavailable(f"{self._shown_url}: not JSON ({error}): {_excerpt(response)}") from error
        return parse_response(answer, len(queries), k)

    def _check_status(self, response: httpx2.Response) -> None:
        problem = f"{self._shown_url}: HTTP {response.status_code}: {_excerpt(response)}"
        if response.is_server_error or response.status_code in WORTH_RETRYING:
            raise SearchUnavailable(problem)
        if response.status_code in REFUSED:
            raise SearchError(problem)
        if response.is_redirect:
            raise MalformedResponse(f"{problem}; it redirects to {response.headers.get('Location')!r}: use that URL")
        if not response.is_success:
            raise MalformedResponse(problem)


def parse_response(response: Any, num_queries: int, k: int) -> list[list[Passage]]:
    """Read a response that is already decoded from JSON: `{"result": [[{"document": …, "score": 0.5}]]}`.

    A document has one of the schemas of `Corpus`, but may lack an `id`. Without scores, it replaces the hit object. A
    score that is not a finite number becomes `None`, because it should not end a run. A lone surrogate, which no
    tokenizer can encode, becomes U+FFFD. Hits beyond the first `k` of a query are dropped.

    Raises MalformedResponse for other responses, and if the numbers of results and queries differ.
    """
    try:
        found = [[_passage(hit) for hit in hits[:k]] for hits in response["result"]]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise MalformedResponse(f"not an answer in Search-R1's format: {repr(response)[:EXCERPT_LENGTH]}") from error
    if len(found) != num_queries:
        raise MalformedResponse(f"the server returned {len(found)} results for {num_queries} queries")
    return found


def _passage(hit: dict[str, Any]) -> Passage:
    document = hit.get("document", hit)
    title, text = title_and_text(document)
    identifier = "" if document.get("id") is None else str(document["id"])
    return Passage(encodable(identifier), encodable(title), encodable(text), _finite(hit.get("score")))


def _finite(score: Any) -> float | None:
    try:
        number = float(score)
    except (TypeError, ValueError, OverflowError):  # JSON's integers have no limit
        return None
    return number if math.isfinite(number) else None


def _check_url(url: str) -> None:
    """Raise ValueError unless the URL has a server and a path."""
    rule = "url must be an http or https URL with a path, such as http://127.0.0.1:8000/retrieve"
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(f"{rule}, got {without_user(url)!r} ({error})") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.path == "/":
        raise ValueError(f"{rule}, got {without_user(url)!r}")


def _excerpt(response: httpx2.Response) -> str:
    return repr(response.content[: 4 * EXCERPT_LENGTH].decode("utf-8", "replace")[:EXCERPT_LENGTH])
