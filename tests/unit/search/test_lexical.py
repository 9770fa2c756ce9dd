"""How text is split into tokens, and what the two engines make of them."""

from __future__ import annotations

import math

import bm25s
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.search import BM25Index, TantivyIndex, write_corpus
from sorl_trl.search.lexical import tokenize
from sorl_trl.types import Passage


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("?! ... — ・、。 <|im_end|>", ["im", "end"]),
        ("The U.S. and C++", ["u", "s", "c"]),
        ("Curaçao CURACAO", ["curacao", "curacao"]),
        ("İstanbul Straße ÅNGSTRÖM", ["istanbul", "strasse", "angstrom"]),
        ("New_York O'Brien's", ["new", "york", "o", "brien", "s"]),
        ("東京タワー 2020年", ["東", "京", "タ", "ワ", "ー", "2020", "年"]),
        ("が ｶﾞ", ["が", "ガ"]),
        ("한국", ["한", "국"]),
        ("Москва Αθήνα", ["москва", "αθηνα"]),
        ("कि की", ["कि", "की"]),
        ("தமிழ்", ["தமிழ்"]),
        ("ภาษาที่", ["ภ", "า", "ษ", "า", "ที่", "ภา", "าษ", "ษา", "าที่"]),
        ("ปี2020 ๒๕๖๓", ["ปี", "2020", "๒๕๖๓"]),
        ("ລາວ", ["ລ", "າ", "ວ", "ລາ", "າວ"]),
        ("ទឹក\u200bក Khmer", ["ទឹ", "ក", "ក", "ទឹក", "កក", "khmer"]),
        ("မြို့", ["မြို့"]),
        ("מַיִם כָּתַב", ["מים", "כתב"]),
        ("كَتَبَ", ["كتب"]),
        ("to be or not to be", []),
    ],
)
def test_tokens_worked_by_hand(text, tokens):
    assert tokenize(text) == tokens


def build(engine, folder, *texts):
    write_corpus([Passage(str(i), "", text) for i, text in enumerate(texts)], folder / "corpus.jsonl")
    return engine.build(folder / "corpus.jsonl", folder / engine.engine, show_progress=False)


@pytest.mark.parametrize(("engine", "k1", "factor"), [(BM25Index, 1.5, 1), (TantivyIndex, 1.2, 2.2)])
def test_scores_worked_by_hand(tmp_path, engine, k1, factor):
    """BM25: idf = ln(1 + (N - n + 0.5) / (n + 0.5)), times tf / (tf + k1 (1 - b + b length / mean length)).

    Lucene leaves out the constant factor k1 + 1 of the original; tantivy has it.
    """
    [[hit]] = build(engine, tmp_path, "cat cat dog", "dog").search_batch(["cat"], 3)
    idf = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    assert hit.id == "0"
    assert hit.score == pytest.approx(idf * factor * 2 / (2 + k1 * (1 - 0.75 + 0.75 * 3 / 2)), rel=1e-5)


words = st.lists(st.sampled_from(["red", "green", "blue", "cat", "dog", "of"]), max_size=6).map(" ".join)


@settings(deadline=None, max_examples=50)
@given(texts=st.lists(words, max_size=8), query=words, k=st.integers(1, 10))
def test_a_loaded_index_equals_bm25s_in_memory_with_ties_in_order(tmp_path_factory, texts, query, k):
    texts = [*texts, "red green blue cat dog"]  # Every query token is then in the vocabulary.
    vocabulary: dict[str, int] = {}
    token_ids = [[vocabulary.setdefault(token, len(vocabulary)) for token in tokenize(text)] for text in texts]
    engine = bm25s.BM25()
    engine.index((token_ids, vocabulary), create_empty_token=False, show_progress=False)
    scores = engine.get_scores_from_ids(sorted({vocabulary[token] for token in tokenize(query)}))

    index = build(BM25Index, tmp_path_factory.mktemp("index"), *texts)
    found = [(-hit.score, int(hit.id)) for hit in index.search_batch([query], k)[0]]
    assert found == sorted((-score, i) for i, score in enumerate(scores.tolist()) if score > 0)[:k]


@settings(deadline=None, max_examples=25)
@given(texts=st.lists(words, min_size=1, max_size=8), query=words)
def test_tantivy_finds_what_bm25_finds(tmp_path_factory, texts, query):
    folder = tmp_path_factory.mktemp("index")
    index = build(TantivyIndex, folder, *texts, "cat")
    [found] = index.search_batch([query], 100)
    [reference] = build(BM25Index, folder, *texts, "cat").search_batch([query], 100)
    assert {hit.id for hit in found} == {hit.id for hit in reference}
    assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
    assert TantivyIndex.load(folder / "tantivy").search_batch([query], 100) == [found], "always the same"
