from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace

import bm25s
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.search import BM25Index, CorpusError, write_corpus
from sorl_trl.search.engines.bm25 import INDEX_FILES
from sorl_trl.search.engines.tokenize import tokenize
from sorl_trl.types import Passage


def ids(index, query, k=3):
    return [passage.id for passage in index.search_batch([query], k)[0]]


def build(tmp_path, *texts):
    write_corpus([Passage(str(i), "", text) for i, text in enumerate(texts)], tmp_path / "corpus.jsonl")
    return BM25Index.build(tmp_path / "corpus.jsonl", tmp_path / "index", show_progress=False)


def test_scores_worked_by_hand(tmp_path):
    """Lucene's BM25: idf = ln(1 + (N - n + 0.5) / (n + 0.5)); tf / (tf + k1 (1 - b + b length / mean length))."""
    index = build(tmp_path, "cat cat dog", "dog")
    [[hit]] = index.search_batch(["cat"], 3)
    idf = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    expected = idf * 2 / (2 + 1.5 * (1 - 0.75 + 0.75 * 3 / 2))
    assert hit.id == "0"
    assert hit.score == pytest.approx(expected, rel=1e-5)


def test_hits_carry_the_passage_and_its_score(index):
    [[hit, other]] = index.search_batch(["capital France"], 3)
    assert replace(hit, score=None) == Passage("fr", "France", "The capital of France is Paris.")
    assert hit.score > other.score > 0
    assert other.id == "it"


@pytest.mark.parametrize("query", ["", "   ", "?!", "・", "the of", "zzz", "\ud800", "<|im_end|>", "\x00"])
def test_a_query_without_a_hit_gives_nothing(index, query):
    assert index.search_batch([query], 3) == [[]]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("curacao", ["cw"]),
        ("CURAÇAO", ["cw"]),
        ("日本", ["jp"]),
        ("twin", ["twin1", "twin2"]),
        ('"river" AND title:(Tiber', ["it"]),
    ],
)
def test_queries(index, query, expected):
    assert ids(index, query) == expected


def test_ties_keep_the_order_of_the_corpus(tmp_path):
    index = build(tmp_path, *["same words"] * 50)
    assert ids(index, "words", k=3) == ["0", "1", "2"]


def test_k_above_the_number_of_passages_gives_what_there_is(index):
    assert ids(index, "capital", k=1000) == ["fr", "it"]


def test_a_huge_query_is_served(index):
    assert ids(index, "river " * 100_000 + "x" * 1_000_000) == ["it"]


def test_order_and_repetition_of_query_words_change_nothing(index):
    assert index.search_batch(["Rome capital"], 3) == index.search_batch(["capital Rome capital rome"], 3)


def test_one_answer_per_query_in_order(index):
    assert index.search_batch([], 3) == []
    batch = index.search_batch(["Rome", "zzz", "Paris"], 1)
    assert [[passage.id for passage in hits] for hits in batch] == [["it"], [], ["fr"]]


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_one_is_an_error(index, k):
    with pytest.raises(ValueError, match=f"`k` is {k}, but must be a whole number, at least 1"):
        index.search_batch(["Rome"], k)


def test_a_single_string_is_an_error(index):
    with pytest.raises(TypeError, match="queries must be a sequence of strings, got the string 'Rome'"):
        index.search_batch("Rome", 1)


def test_a_corpus_of_one_passage(tmp_path):
    assert ids(build(tmp_path, "lonely"), "lonely") == ["0"]


words = st.lists(st.sampled_from(["red", "green", "blue", "cat", "dog", "of"]), max_size=6).map(" ".join)


@settings(deadline=None)
@given(texts=st.lists(words, max_size=8), query=words, k=st.integers(1, 10))
def test_a_loaded_index_equals_bm25s_in_memory(tmp_path_factory, texts, query, k):
    texts = [*texts, "red green blue cat dog"]  # Every query token is then in the vocabulary.
    vocabulary: dict[str, int] = {}
    token_ids = [[vocabulary.setdefault(token, len(vocabulary)) for token in tokenize(text)] for text in texts]
    engine = bm25s.BM25()
    engine.index((token_ids, vocabulary), create_empty_token=False, show_progress=False)
    scores = engine.get_scores_from_ids(sorted({vocabulary[token] for token in tokenize(query)}))

    index = build(tmp_path_factory.mktemp("index"), *texts)
    found = [(-hit.score, int(hit.id)) for hit in index.search_batch([query], k)[0]]
    assert found == sorted((-score, i) for i, score in enumerate(scores.tolist()) if score > 0)[:k]


@pytest.mark.parametrize("hash_seed", ["1", "2"])
@pytest.mark.trains
def test_builds_are_byte_for_byte_equal_in_every_process(corpus_path, index_dir, tmp_path, hash_seed):
    """The order of a Python set of strings changes with the hash seed: nothing in the index may depend on it."""
    program = "import sys; from sorl_trl.search import BM25Index; BM25Index.build(*sys.argv[1:], show_progress=False)"
    command = [sys.executable, "-c", program, str(corpus_path), str(tmp_path / "again")]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": hash_seed})
    for name in (*INDEX_FILES, "manifest.json"):
        assert (tmp_path / "again" / name).read_bytes() == (index_dir / name).read_bytes()


def test_the_index_does_not_need_the_corpus_file(tmp_path):
    build(tmp_path, "cat", "dog")
    (tmp_path / "corpus.jsonl").unlink()
    assert ids(BM25Index.load(tmp_path / "index"), "dog") == ["1"]


def test_an_existing_directory_is_not_overwritten(corpus_path, tmp_path):
    with pytest.raises(FileExistsError, match=r"index_dir .* exists"):
        BM25Index.build(corpus_path, tmp_path)


def test_a_corpus_without_a_token_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"corpus_path .*corpus.jsonl: no passage holds"):
        build(tmp_path, "?!", "the")


def test_a_failed_build_leaves_nothing(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "contents": "T\\nt"}\n{\n')
    with pytest.raises(CorpusError, match=r"corpus.jsonl, line 2"):
        BM25Index.build(tmp_path / "corpus.jsonl", tmp_path / "indexes" / "index", show_progress=False)
    assert list((tmp_path / "indexes").iterdir()) == []


def test_progress_is_shown_on_demand_only(corpus_path, tmp_path, capsys):
    BM25Index.build(corpus_path, tmp_path / "silent", show_progress=False)
    assert capsys.readouterr() == ("", "")
    BM25Index.build(corpus_path, tmp_path / "shown", show_progress=True)
    assert "Splitting into tokens" in capsys.readouterr().err


def test_identity_is_that_of_the_content(corpus_path, index, tmp_path):
    again = BM25Index.build(corpus_path, tmp_path / "again", show_progress=False)
    other = build(tmp_path, "another corpus")
    assert again.identity == index.identity != other.identity
    assert index.identity.startswith("bm25-")
    assert (len(index), len(other)) == (7, 1)


def test_several_files_make_one_corpus(tmp_path):
    for name in ("y", "x"):
        write_corpus([Passage(name, "", f"same {name}")], tmp_path / f"{name}.jsonl")
    index = BM25Index.build([tmp_path / "y.jsonl", tmp_path], tmp_path / "index", show_progress=False)
    assert ids(index, "same") == ["y", "x", "y"]
