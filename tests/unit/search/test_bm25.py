"""How text is split into tokens, what BM25 makes of them, and how an index is built, opened, asked and refused."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import bm25s
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.search import BM25Index, CorpusError, IndexOutdated, write_corpus
from sorl_trl.search.bm25 import tokenize
from sorl_trl.types import Passage

PASSAGES = [
    Passage("fr", "France", "The capital of France is Paris."),
    Passage("it", "Italy", "The capital of Italy is Rome; its river is the Tiber."),
    Passage("cw", "Curaçao", "Willemstad is the largest town."),
    Passage("jp", "東京", "東京は日本の首都。"),
    Passage("twin1", "Twin", "Gemini stars"),
    Passage("twin2", "Twin", "Gemini stars"),
    Passage("blank", "", "?!"),
]
"""A corpus: accents, Japanese, twins, and one without a word."""


@pytest.fixture(scope="session")
def corpus_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_corpus(PASSAGES, path)
    return path


@pytest.fixture(scope="session")
def index_dir(corpus_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("indexes") / "index"
    BM25Index.build(corpus_path, directory, show_progress=False)
    return directory


@pytest.fixture(scope="session")
def index(index_dir: Path) -> BM25Index:
    return BM25Index.load(index_dir)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("?! ... — ・、。 <|im_end|>", ["im", "end"]),
        ("The U.S. and C++", ["u", "s", "c"]),
        ("Curaçao CURACAO", ["curacao", "curacao"]),
        ("İstanbul Straße ÅNGSTRÖM", ["istanbul", "strasse", "angstrom"]),
        ("New_York O'Brien's", ["new", "york", "o", "brien", "s"]),
        ("Москва Αθήνα", ["москва", "αθηνα"]),
        ("कि की", ["कि", "की"]),
        ("தமிழ்", ["தமிழ்"]),
        ("東京 ๒๕๖๓", ["東京", "๒๕๖๓"]),
        ("מַיִם כָּתַב", ["מים", "כתב"]),
        ("كَتَبَ", ["كتب"]),
        ("to be or not to be", []),
    ],
)
def test_tokens_worked_by_hand(text, tokens):
    assert tokenize(text) == tokens


def build(folder, *texts):
    write_corpus([Passage(str(i), "", text) for i, text in enumerate(texts)], folder / "corpus.jsonl")
    return BM25Index.build(folder / "corpus.jsonl", folder / "index", show_progress=False)


def test_scores_worked_by_hand(tmp_path):
    """BM25: idf = ln(1 + (N - n + 0.5) / (n + 0.5)), times tf / (tf + k1 (1 - b + b length / mean length)).

    Lucene leaves out the constant factor k1 + 1 of the original.
    """
    [[hit]] = build(tmp_path, "cat cat dog", "dog").search_batch(["cat"], 3)
    idf = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    assert hit.id == "0"
    assert hit.score == pytest.approx(idf * 2 / (2 + 1.5 * (1 - 0.75 + 0.75 * 3 / 2)), rel=1e-5)


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

    index = build(tmp_path_factory.mktemp("index"), *texts)
    found = [(-hit.score, int(hit.id)) for hit in index.search_batch([query], k)[0]]
    assert found == sorted((-score, i) for i, score in enumerate(scores.tolist()) if score > 0)[:k]


def ids(index: Any, query: str) -> list[str]:
    return [passage.id for passage in index.search_batch([query], 3)[0]]


def test_an_index_is_its_corpus(index_dir: Path, corpus_path: Path, tmp_path: Path) -> None:
    again, loaded = BM25Index.build(corpus_path, tmp_path / "deep" / "again"), BM25Index.load(index_dir)
    assert again.identity == loaded.identity
    assert len(again) == len(loaded) == len(PASSAGES)
    assert again.search_batch(["capital of France"], 2) == loaded.search_batch(["capital of France"], 2)
    with pytest.raises(FileExistsError, match="index_dir"):
        BM25Index.build(corpus_path, index_dir)
    other = BM25Index.build([corpus_path, corpus_path], tmp_path / "other")
    assert (len(other), other.identity != again.identity) == (2 * len(PASSAGES), True)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "contents": "T\\nt"}\n{\n')
    with pytest.raises(CorpusError, match=r"corpus.jsonl, line 2"):
        BM25Index.build(tmp_path / "corpus.jsonl", tmp_path / "indexes" / "index")
    assert list((tmp_path / "indexes").iterdir()) == []


def test_open_builds_where_there_is_none_and_loads_for_its_corpus_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    write_corpus(PASSAGES, corpus)
    assert ids(BM25Index.open(corpus, tmp_path / "index"), "rome") == ["it"]
    assert "Reading passages" in capsys.readouterr().err
    monkeypatch.setattr(BM25Index, "build", lambda *_: pytest.fail("built again"))
    assert ids(BM25Index.open(corpus, tmp_path / "index"), "rome") == ["it"]
    write_corpus(PASSAGES[:2], corpus)
    with pytest.raises(IndexOutdated, match=r"index .*index: .*corpus\.jsonl") as raised:
        BM25Index.open(corpus, tmp_path / "index")
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value), "as a worker process sends it"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("curacao", ["cw"]),
        ("CURAÇAO", ["cw"]),
        ("東京", ["jp"]),
        ("twin", ["twin1", "twin2"]),
        ('"river" AND title:(Tiber^-[', ["it"]),
        ("tokens:paris", ["fr"]),
        ("river " * 100_000 + "x" * 1_000_000, ["it"]),
        *((text, []) for text in ("", " ", "?!", "・", "the of", "zzz", "\ud800", "<|im_end|>", "\x00", "y" * 9999)),
    ],
)
def test_queries_are_text_and_no_query_language(index: BM25Index, query: str, expected: list[str]) -> None:
    assert ids(index, query) == expected


def test_one_answer_per_query_in_order_with_its_passages_and_scores(index: BM25Index) -> None:
    batch = index.search_batch(["Rome", "zzz", "capital France"], 2)
    assert [[passage.id for passage in hits] for hits in batch] == [["it"], [], ["fr", "it"]]
    hit, other = batch[2]
    assert replace(hit, score=None) == PASSAGES[0]
    assert hit.score > other.score > 0
    assert index.search_batch(["capital Rome capital rome"], 3) == index.search_batch(["Rome capital"], 3)


def changed(directory: Path, copy: Path, **changes: Any) -> Path:
    """A copy of an index whose manifest has other fields."""
    shutil.copytree(directory, copy)
    record = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(record | changes))
    return copy


def test_what_is_no_index_of_this_version_is_named(index_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"`index` is '.*nowhere'"):
        BM25Index.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        BM25Index.load(tmp_path)
    with pytest.raises(IndexOutdated, match=r"version 6, .*; delete the folder to rebuild it"):
        BM25Index.load(changed(index_dir, tmp_path / "old", format_version=6, engine="tantivy", settings={}))
    with pytest.raises(IndexOutdated, match="cannot be read"):
        BM25Index.load(changed(index_dir, tmp_path / "other", library="bm25s 0.3"))
