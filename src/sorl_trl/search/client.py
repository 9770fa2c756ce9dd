"""The client of a search server: asks it, and reads the answers of Search-R1's `/retrieve` and its variants in use."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence

import httpx2

from sorl_trl.checks import Number
from sorl_trl.search.backend import SearchError, SearchUnavailable, check_request
from sorl_trl.search.corpus import title_and_text
from sorl_trl.text import encodable, without_user
from sorl_trl.threads import DaemonThreads
from sorl_trl.types import Passage

BATCH_SIZE = 64
"""The most queries per request."""
CONCURRENCY = 8
"""The most requests at a time that one search makes."""
LONGEST_RESPONSE = 1 << 28
"""Bytes; our choice."""
EXCERPT_LENGTH = 200
WORTH_RETRYING = (408, 429)
"""HTTP codes that mean "later". Like any 5xx, they say nothing about the request."""
REFUSED = (400, 413, 414, 422)
"""HTTP codes with which a server refuses this request. Others, such as "not found", would refuse any request."""


class MalformedResponse(ValueError):
    """The server's answer is not a search result, so it is the wrong server.

    No retry can mend this mistake in the setup. It is neither a `SearchError` nor a `SearchUnavailable`, so it ends
    the run.
    """

    def __init__(self, problem: str, response: object) -> None:
        super().__init__(f"{problem}; the response begins: {_excerpt(response)}")


class HTTPSearch:
    """A `SearchBackend` that asks a Search-R1 `/retrieve` server over pooled connections.

    It tries each request once; rollouts retry. Half of a surrogate pair in a query is sent as U+FFFD. Threads may
    share it.

    Args:
        url: The URL to POST to, including the path: `http://127.0.0.1:8000/retrieve`. User and password can be given
            as `http://user:password@…`; no message shows them.
        timeout_s: Seconds for connecting, for each wait for bytes, and for a whole response.

    Raises:
        ValueError: An argument is out of range or, in a search, the server is the wrong one (MalformedResponse).
    """

    thread_safe = True

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        _check_url(url)
        Number(above=0).check("timeout_s", timeout_s)
        self._url, self._shown_url = url, without_user(url)
        self._timeout_s = timeout_s
        self._client = httpx2.Client(timeout=timeout_s)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Raises `MalformedResponse` if the answer is no search result."""
        check_request(queries, k)
        batches = [queries[i : i + BATCH_SIZE] for i in range(0, len(queries), BATCH_SIZE)]
        if len(batches) < 2:
            return self._ask(queries, k) if queries else []
        threads = DaemonThreads(min(CONCURRENCY, len(batches)), "sorl-search")
        answers = [threads.submit(self._ask, batch, k) for batch in batches]
        return [passages for answer in answers for passages in answer.result()]

    def _ask(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        # Without scores, Search-R1's server answers HTTP 500, or returns wrong rows for exactly two queries.
        asked = {"queries": [encodable(query) for query in queries], "topk": k, "return_scores": True}
        request = json.dumps(asked).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        deadline = time.monotonic() + self._timeout_s
        try:
            with self._client.stream("POST", self._url, content=request, headers=headers) as response:
                body = self._read(response, deadline)
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise SearchUnavailable(f"{self._shown_url}: {error!r}") from error
        self._check_status(response, body)
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise SearchUnavailable(
                f"{self._shown_url}: the response is not JSON ({error}): {_text(body)!r}"
            ) from error
        return parse_response(answer, len(queries), k)

    def _read(self, response: httpx2.Response, deadline: float) -> bytes:
        """Read the body. Raises an error if it takes too long, as when it comes byte by byte, or is too large."""
        body = bytearray()
        for piece in response.iter_bytes():
            body += piece
            if time.monotonic() > deadline:
                raise httpx2.ReadTimeout(f"the response is not whole after {self._timeout_s} s")
            if len(body) > LONGEST_RESPONSE:
                raise MalformedResponse(f"{self._shown_url}: more than {LONGEST_RESPONSE:,} bytes", _text(body))
        return bytes(body)

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


def parse_response(response: object, num_queries: int, k: int) -> list[list[Passage]]:
    """Parse any of the known responses, already decoded from JSON.

    The lists of hits are in `result` or `results`. A hit is a document, `{"document", "score"}`, a document's fields
    including a `score`, or the pair `[document, score]` with a numeric score. A document is one string of `"Title"`, a
    newline and the text, or an object with `title` and `content` or `text`, or with only `contents`, `content` or
    `text`. A list that is null is empty, as servers in Go write it. Hits that are null, or whose document is, are left
    out. A score may be a string; a score that is missing, not a number or not finite becomes `None`, because no run
    should end over it. A missing identifier becomes empty. Half a surrogate pair, which no tokenizer can encode,
    becomes U+FFFD. Hits beyond the first `k` of a query are cut, because some servers ignore `topk`.

    Raises MalformedResponse for other responses, and if the number of results is not that of queries.
    """
    results = response.get("result", response.get("results")) if isinstance(response, dict) else None
    if not isinstance(results, list):
        raise MalformedResponse("the server returned no list `result` or `results`", response)
    if len(results) != num_queries:
        raise MalformedResponse(f"the server returned {len(results)} results for {num_queries} queries", response)
    try:
        return [_passages(result)[:k] for result in results]
    except ValueError as error:
        raise MalformedResponse(str(error), response) from error


def _passages(result: object) -> list[Passage]:
    if result is None:
        return []
    if not isinstance(result, list) or _is_pair(result):
        raise ValueError(f"the result of a query must be a list of hits, got {_excerpt(result)}")
    found = [_document_and_score(hit) for hit in result]
    return [_passage(document, score) for document, score in found if document is not None]


def _is_pair(value: list[object]) -> bool:
    """Whether this is `[document, score]`, and not two hits."""
    return len(value) == 2 and isinstance(value[0], str | dict) and isinstance(value[1], int | float)


def _document_and_score(hit: object) -> tuple[object, object]:
    if isinstance(hit, list) and _is_pair(hit):
        return hit[0], hit[1]
    if isinstance(hit, dict):
        return hit.get("document", hit), hit.get("score")
    return hit, None


def _passage(document: object, score: object) -> Passage:
    if isinstance(document, str):
        document = {"contents": document}
    if not isinstance(document, dict):
        raise ValueError(f"a hit must be a string, an object or a pair, got {_excerpt(document)}")
    title, text = title_and_text(document)
    identifier = "" if document.get("id") is None else str(document["id"])
    return Passage(encodable(identifier), encodable(title), encodable(text), _finite(score))


def _finite(score: object) -> float | None:
    if isinstance(score, bool) or not isinstance(score, str | int | float):
        return None
    try:
        number = float(score)
    except (ValueError, OverflowError):  # JSON's integers have no limit.
        return None
    return number if math.isfinite(number) else None


def _check_url(url: str) -> None:
    """Raise ValueError unless the URL has a server and a path, without which it would answer no search."""
    rule = "url must be an http or https URL with a path, such as http://127.0.0.1:8000/retrieve"
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(f"{rule}, got {without_user(url)!r} ({error})") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.path == "/":
        raise ValueError(f"{rule}, got {without_user(url)!r}")


def _excerpt(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return repr(text[:EXCERPT_LENGTH])


def _text(body: bytes | bytearray) -> str:
    return body[: 4 * EXCERPT_LENGTH].decode("utf-8", "replace")[:EXCERPT_LENGTH]
