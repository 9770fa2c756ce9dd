from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.search.wire import MalformedResponse, parse_response
from sorl_trl.types import Passage

PARIS = '"Paris"\nOn the Seine.'
ROME = '"Rome"\nOn the Tiber.'


def parse(text: str, num_queries: int = 1, k: int = 3) -> list[list[Passage]]:
    return parse_response(json.loads(text), num_queries, k)


DENSE = """{"result": [[{"document": {"id": "7", "contents": "\\"Paris\\"\\nOn the Seine."}, "score": 0.5},
                        {"document": {"id": 8, "contents": "\\"Rome\\"\\nOn the Tiber."}, "score": -2}], []]}"""


def test_search_r1_dense() -> None:
    seine, tiber = Passage("7", "Paris", "On the Seine.", 0.5), Passage("8", "Rome", "On the Tiber.", -2.0)
    assert parse(DENSE, num_queries=2) == [[seine, tiber], []]


@pytest.mark.parametrize(
    ("variant", "hit", "passage"),
    [
        (
            "Search-R1, BM25: no identifier",
            {"document": {"title": "Paris", "text": "On the Seine.", "contents": PARIS}, "score": 9.5},
            Passage("", "Paris", "On the Seine.", 9.5),
        ),
        ("reranker: a string", {"document": PARIS, "score": 1}, Passage("", "Paris", "On the Seine.", 1.0)),
        ("SerpAPI: no score", {"document": {"contents": PARIS}}, Passage("", "Paris", "On the Seine.")),
        ("slime: flat", {"id": "7", "contents": PARIS}, Passage("7", "Paris", "On the Seine.")),
        (
            "flat, with a score",
            {"id": "7", "contents": PARIS, "score": 2.5},
            Passage("7", "Paris", "On the Seine.", 2.5),
        ),
        ("rLLM", {"id": "7", "content": PARIS, "score": 0.25}, Passage("7", "Paris", "On the Seine.", 0.25)),
        ("text alone", {"text": "On the Seine."}, Passage("", "", "On the Seine.")),
        (
            "MedRAG",
            {"document": {"id": "m", "title": "T", "content": "c\nd", "contents": "T. c d"}, "score": None},
            Passage("m", "T", "c\nd"),
        ),
        (
            "pair of an object and a score",
            [{"id": "7", "contents": PARIS}, 3],
            Passage("7", "Paris", "On the Seine.", 3.0),
        ),
        ("pair of a string and a score", [PARIS, 0.5], Passage("", "Paris", "On the Seine.", 0.5)),
        ("a bare string without a title", "On the Seine.", Passage("", "", "On the Seine.")),
        ("one pair of quotes is dropped", '""Heroes""\nA song.', Passage("", '"Heroes"', "A song.")),
        ("null identifier", {"id": None, "contents": PARIS}, Passage("", "Paris", "On the Seine.")),
    ],
)
def test_the_hit_of_each_variant(variant: str, hit: object, passage: Passage) -> None:
    assert parse_response({"results": [[hit]]}, 1, 3) == [[passage]], variant
    assert parse_response({"result": [[hit, hit], [hit]]}, 2, 3) == [[passage, passage], [passage]], variant


def test_hits_beyond_k_are_cut() -> None:
    assert parse(DENSE, num_queries=2, k=1)[0] == [Passage("7", "Paris", "On the Seine.", 0.5)]


@pytest.mark.parametrize("score", ["NaN", "Infinity", "-Infinity", "1" + "0" * 400])
def test_a_score_that_compares_with_nothing_is_none(score: str) -> None:
    assert parse(f'{{"result": [[{{"document": "t", "score": {score}}}]]}}') == [[Passage("", "", "t")]]


@pytest.mark.parametrize(
    ("score", "read"),
    [("1.5", 1.5), (" -2 ", -2.0), ("high", None), ("", None), ("nan", None), (True, None), ([1], None), ({}, None)],
)
def test_a_score_is_a_number_however_spelled_or_none(score: object, read: float | None) -> None:
    assert parse_response({"result": [[{"document": PARIS, "score": score}]]}, 1, 3) == [
        [Passage("", "Paris", "On the Seine.", read)]
    ]


@pytest.mark.parametrize("null", [None, {"document": None}, {"document": None, "score": 0.5}])
def test_a_hit_without_a_document_is_left_out(null: object) -> None:
    paris, rome = Passage("", "Paris", "On the Seine."), Passage("", "Rome", "On the Tiber.")
    response = {"result": [[null, PARIS, null, ROME], [PARIS, null], [null], []]}
    assert parse_response(response, 4, 2) == [[paris, rome], [paris], [], []]


def test_null_in_the_place_of_hits_is_no_hit() -> None:
    assert parse_response({"result": [None]}, 1, 3) == [[]]
    found, nothing = parse_response({"results": [[PARIS], None]}, 2, 3)
    assert [passage.title for passage in found] == ["Paris"] and nothing == []


def test_two_strings_in_the_place_of_hits_are_two_hits() -> None:
    hits = [Passage("", "", "a document"), Passage("", "", "0.5")]
    assert parse_response({"result": [["a document", "0.5"]]}, 1, 3) == [hits]


def test_half_a_surrogate_pair_is_replaced() -> None:
    document = r'{"id": "\ud800", "title": "\udc00T", "text": "a\ud83db\ud83d\ude00"}'
    (passage,) = parse(f'{{"result": [[{document}]]}}')[0]
    assert passage == Passage("\ufffd", "\ufffdT", "a\ufffdb\N{GRINNING FACE}")


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ([], "no list `result` or `results`"),
        ({}, "no list `result` or `results`"),
        ({"result": None}, "no list `result` or `results`"),
        ({"error": "no query"}, "no query"),
        ({"result": {"a": 1}}, "no list `result` or `results`"),
        ({"result": []}, "0 results for 2 queries"),
        ({"result": [[]]}, "1 results for 2 queries"),
        ({"result": [[], [], []]}, "3 results for 2 queries"),
        ({"result": [[], {"document": PARIS}]}, "must be a list of hits"),
        ({"result": [[], [PARIS, 0.5]]}, "must be a list of hits"),
        ({"result": [[], [3]]}, "a hit must be"),
        ({"result": [[], [[PARIS, 0.5, 1]]]}, "a hit must be"),
        ({"result": [[], [["Seine", "Tiber"]]]}, "a hit must be"),  # a pair would lose the second
        ({"result": [[], [{}]]}, "a passage needs"),
        ({"result": [[], [{"text": 3}]]}, "a passage needs"),
    ],
)
def test_what_is_no_result_is_shown(response: object, problem: str) -> None:
    with pytest.raises(MalformedResponse, match=problem) as caught:
        parse_response(response, 2, 3)
    assert f"the response begins: {json.dumps(response)[:200]!r}" in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["document", "id", "score", "title", "text", "contents"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(result=json_values)
def test_any_json_is_read_or_refused(result: object) -> None:
    try:
        (passages,) = parse_response({"result": result}, 1, 2)
    except MalformedResponse:
        return
    assert len(passages) <= 2
    assert all(f"{p.id}{p.title}{p.text}".encode() or p.text == "" for p in passages)
