"""Parses the answers of search servers: Search-R1's `/retrieve` and its variants in use."""

from __future__ import annotations

import json
import math

from sorl_trl.search.corpus import split_contents, title_and_text
from sorl_trl.text import encodable
from sorl_trl.types import Passage

EXCERPT_LENGTH = 200


class MalformedResponse(ValueError):
    """The server's answer is not a search result, so it is the wrong server.

    No retry can mend this mistake in the setup. It is neither a `SearchError` nor a `SearchUnavailable`, so it ends
    the run.
    """

    def __init__(self, problem: str, response: object) -> None:
        super().__init__(f"{problem}; the response begins: {_excerpt(response)}")


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
        title, text = split_contents(document)
        return Passage("", encodable(title), encodable(text), _finite(score))
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


def _excerpt(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return repr(text[:EXCERPT_LENGTH])
