from __future__ import annotations

import math

import pytest
import tantivy
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.search import BM25Index, IndexCorrupted, TantivyIndex, write_corpus
from sorl_trl.search.engines import tantivy as module
from sorl_trl.search.engines.tantivy import best_hits
from sorl_trl.types import Passage


def build(tmp_path, *texts):
    write_corpus([Passage(str(i), "", text) for i, text in enumerate(texts)], tmp_path / "corpus.jsonl")
    return TantivyIndex.build(tmp_path / "corpus.jsonl", tmp_path / "index", show_progress=False)


def test_scores_worked_by_hand(tmp_path):
    """idf (k1 + 1) tf / (tf + k1 (1 - b + b length / mean length)), with k1 = 1.2 and b = 0.75."""
    [[hit]] = build(tmp_path, "cat cat dog", "dog").search_batch(["cat"], 3)
    idf = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    assert hit.id == "0"
    assert hit.score == pytest.approx(idf * 2.2 * 2 / (2 + 1.2 * (1 - 0.75 + 0.75 * 3 / 2)), rel=1e-5)


words = st.lists(st.sampled_from(["red", "green", "blue", "cat", "dog", "of"]), max_size=6).map(" ".join)


@settings(deadline=None, max_examples=25)
@given(texts=st.lists(words, min_size=1, max_size=8), query=words)
def test_it_finds_what_bm25_finds(tmp_path_factory, texts, query):
    directory = tmp_path_factory.mktemp("index")
    found = build(directory, *texts, "cat").search_batch([query], 100)[0]
    reference = BM25Index.build(directory / "corpus.jsonl", directory / "bm25", show_progress=False)
    assert {hit.id for hit in found} == {hit.id for hit in reference.search_batch([query], 100)[0]}
    assert found == sorted(found, key=lambda hit: (-hit.score, int(hit.id)))


def test_ties_keep_the_order_of_the_corpus_in_any_order_of_segments():
    """tantivy orders ties by segment, and segments as their merges happen to end."""
    index = tantivy.Index(module._schema())
    writer = index.writer(heap_size=15_000_000, num_threads=1)
    for position in (5, 3, 4, 6, 2, 1):
        document = tantivy.Document()
        document.add_unsigned("position", position)
        document.add_text("tokens", "same same" if position == 4 else "same other")
        writer.add_document(document)
        writer.commit()
    index.reload()
    assert index.searcher().num_segments > 1
    query = tantivy.Query.term_query(index.schema, "tokens", "same", "freq")
    for k in range(1, 9):
        hits = best_hits(index.searcher(), query, k)
        found = index.searcher().fast_field_values("position", [address for _, address in hits])
        assert found == [4, 1, 2, 3, 5, 6][:k]


def test_what_tantivy_cannot_open_is_named(tmp_path):
    build(tmp_path, "cat")
    (tmp_path / "index/tantivy/meta.json").write_text("{}")
    with pytest.raises(IndexCorrupted, match="tantivy cannot open it"):
        TantivyIndex.load(tmp_path / "index")
