"""What search servers are asked and what they answer: Search-R1's `/retrieve` and the variants of it in use."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sorl_trl.search.corpus import split_contents, title_and_text
from sorl_trl.text import encodable
from sorl_trl.types import Passage

logger = logging.getLogger(__name__)

EXCERPT_LENGTH = 200


class MalformedResponse(ValueError):
    """The server's answer is no search result: it is the wrong server, or is asked in the wrong format.

    A mistake in the set-up, which no retry mends: neither a `SearchError` nor a `SearchUnavailable`, so it propagates.
    """

    def __init__(self, problem: str, response: object) -> None:
        super().__init__(f"{problem}; the response begins: {_excerpt(response)}")


@dataclass(frozen=True)
class RequestFormat:
    """How a server wants to be asked: `body` makes the JSON object for some queries and `k`.

    With `single`, a request holds exactly one query, and the answer may be that query's hits without a list around.
    """

    body: Callable[[Sequence[str], int], dict[str, object]]
    single: bool = False


def _search_r1(queries: Sequence[str], k: int) -> dict[str, object]:
    # Without scores, Search-R1's server answers HTTP 500, or wrong rows where there are exactly two queries.
    return {"queries": list(queries), "topk": k, "return_scores": True}


def _skyrl(queries: Sequence[str], k: int) -> dict[str, object]:
    return {"query": queries[0], "topk": k, "return_scores": True}


def _rllm(queries: Sequence[str], k: int) -> dict[str, object]:
    return {"query": queries[0], "k": k}


REQUEST_FORMATS: Mapping[str, RequestFormat] = {
    "search_r1": RequestFormat(_search_r1),
    "skyrl": RequestFormat(_skyrl, single=True),
    "rllm": RequestFormat(_rllm, single=True),
    # These two read the same request and differ in what they answer, which `parse_response` takes as it comes.
    "serpapi": RequestFormat(_search_r1),
    "slime": RequestFormat(_search_r1),
}
"""Server -> its request format. Search-R1's is verl's too."""


def parse_response(response: object, num_queries: int, k: int, single: bool = False) -> list[list[Passage]]:
    """Read any of the known responses, already decoded from JSON.

    The lists of hits are in `result` or `results`. A hit is a document, `{"document", "score"}`, a document's fields
    with a `score` among them, or the pair `[document, score]`. A document is `"Title"`, a newline and the text as one
    string, or an object with `title` and `content` or `text`, or with `contents`, `content` or `text` alone. A hit
    that is null, or whose document is, is left out; a warning says how many were. A score may be spelled as a string;
    what is missing, no number or not finite becomes `None`, for no run must end over it. An identifier that is missing
    becomes empty. Half a surrogate pair, which no tokenizer can encode, becomes U+FFFD.

    A list of two is read by its place: as a hit, `["text", null]` and `["text", "0.5"]` are a document and its score;
    as the hits of a query they are two hits, of which the null one is left out.

    Args:
        response: What the server sent.
        num_queries: How many queries were asked.
        k: Hits beyond the first `k` of a query are cut: some servers ignore what they were asked for.
        single: The hits of the one query may come without a list around them.

    Raises:
        MalformedResponse: It is none of these, or holds another number of results than there were queries.
    """
    results = _results(response)
    if single and not (len(results) == 1 and _is_list_of_hits(results[0])):
        results = [results]
    if len(results) != num_queries:
        raise MalformedResponse(f"the server returned {len(results)} results for {num_queries} queries", response)
    try:
        hits = [_hits(result) for result in results]
        there = [[hit for hit in found if not _is_null(hit)] for found in hits]
        if missing := sum(map(len, hits)) - sum(map(len, there)):
            logger.warning("The search server gave %d hits without a document: left out", missing)
        return [[_passage(hit) for hit in found[:k]] for found in there]
    except ValueError as error:
        raise MalformedResponse(str(error), response) from error


def _results(response: object) -> list[object]:
    results = response.get("result", response.get("results")) if isinstance(response, dict) else None
    if not isinstance(results, list):
        raise MalformedResponse("the server returned no list `result` or `results`", response)
    return results


def _hits(result: object) -> list[object]:
    if not _is_list_of_hits(result):
        raise ValueError(f"the result of a query must be a list of hits, got {_excerpt(result)}")
    assert isinstance(result, list)
    return result


def _is_list_of_hits(value: object) -> bool:
    """Whether these are hits, and not one pair: a number is no hit, whereas null and a string may be."""
    return isinstance(value, list) and not (_is_pair(value) and isinstance(value[1], int | float))


def _is_pair(value: list[object]) -> bool:
    """Whether this is `[document, score]`, wherever it cannot be two hits."""
    return len(value) == 2 and isinstance(value[0], str | dict) and _is_score(value[1])


def _is_score(value: object) -> bool:
    """Whether this stands for a score in a pair. A word is none: it may be a document, which must not get lost."""
    if not isinstance(value, str):
        return value is None or isinstance(value, int | float)
    try:
        float(value)
    except ValueError:
        return False
    return True


def _is_null(hit: object) -> bool:
    return hit is None or (isinstance(hit, dict) and "document" in hit and hit["document"] is None)


def _passage(hit: object) -> Passage:
    document, score = _document_and_score(hit)
    if isinstance(document, str):
        title, text = split_contents(document)
        return Passage("", encodable(title), encodable(text), _finite(score))
    if not isinstance(document, dict):
        raise ValueError(f"a hit must be a string, an object or a pair, got {_excerpt(hit)}")
    title, text = _title_and_text(document)
    return Passage(_identifier(document), encodable(title), encodable(text), _finite(score))


def _document_and_score(hit: object) -> tuple[object, object]:
    if isinstance(hit, list) and _is_pair(hit):
        return hit[0], hit[1]
    if isinstance(hit, dict):
        return hit.get("document", hit), hit.get("score")
    return hit, None


def _title_and_text(document: Mapping[str, object]) -> tuple[str, str]:
    text = document.get("content", document.get("text"))
    alone = "title" not in document and "contents" not in document
    return split_contents(text) if alone and isinstance(text, str) else title_and_text(document)


def _identifier(document: Mapping[str, object]) -> str:
    value = document.get("id")
    return "" if value is None else encodable(str(value))


def _finite(score: object) -> float | None:
    if isinstance(score, bool) or not isinstance(score, str | int | float):
        return None
    try:
        number = float(score)
    except (ValueError, OverflowError):  # JSON knows no largest integer.
        return None
    return number if math.isfinite(number) else None


def _excerpt(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return repr(text[:EXCERPT_LENGTH])
