from __future__ import annotations

import copy
import json
import math
import pickle
import shutil
import sys
from dataclasses import replace

import pytest
import tantivy
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.search.passages import PASSAGES

from sorl_trl.search import BM25Index, CorpusError, IndexCorrupted, IndexOutdated, write_corpus
from sorl_trl.search.engines import tantivy as module
from sorl_trl.search.engines.tantivy import TantivyIndex, best_hits
from sorl_trl.types import Passage


@pytest.fixture(scope="module")
def tantivy_dir(corpus_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("indexes") / "tantivy"
    TantivyIndex.build(corpus_path, directory, show_progress=False)
    return directory


@pytest.fixture(scope="module")
def engine(tantivy_dir):
    return TantivyIndex.load(tantivy_dir)


@pytest.fixture
def copied_dir(tantivy_dir, tmp_path):
    return shutil.copytree(tantivy_dir, tmp_path / "copy")


def ids(index, query, k=3):
    return [passage.id for passage in index.search_batch([query], k)[0]]


def build(tmp_path, *texts):
    write_corpus([Passage(str(i), "", text) for i, text in enumerate(texts)], tmp_path / "corpus.jsonl")
    return TantivyIndex.build(tmp_path / "corpus.jsonl", tmp_path / "index", show_progress=False)


def test_scores_worked_by_hand(tmp_path):
    """idf (k1 + 1) tf / (tf + k1 (1 - b + b length / mean length)), with k1 = 1.2 and b = 0.75."""
    [[hit]] = build(tmp_path, "cat cat dog", "dog").search_batch(["cat"], 3)
    idf = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    assert hit.id == "0"
    assert hit.score == pytest.approx(idf * 2.2 * 2 / (2 + 1.2 * (1 - 0.75 + 0.75 * 3 / 2)), rel=1e-5)


def test_hits_carry_the_passage_and_its_score(engine):
    [[hit, other]] = engine.search_batch(["capital France"], 3)
    assert replace(hit, score=None) == PASSAGES[0]
    assert hit.score > other.score > 0
    assert len(engine) == len(PASSAGES)


@pytest.mark.parametrize(
    "query", ["", "   ", "?!", "・", "the of", "zzz", "\ud800", "<|im_end|>", "\x00", "y" * 100_000]
)
def test_a_query_without_a_hit_gives_nothing(engine, query):
    assert engine.search_batch([query], 3) == [[]]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("curacao", ["cw"]),
        ("CURAÇAO", ["cw"]),
        ("日本", ["jp"]),
        ("twin", ["twin1", "twin2"]),
        ('"river" AND title:(Tiber^-[', ["it"]),
        ("tokens:paris", ["fr"]),
        ("river " * 100_000 + "x" * 1_000_000, ["it"]),
    ],
)
def test_queries_are_text_and_no_query_language(engine, query, expected):
    assert ids(engine, query) == expected


def test_one_answer_per_query_in_order(engine):
    assert engine.search_batch([], 3) == []
    batch = engine.search_batch(["Rome", "zzz", "Paris"], 1)
    assert [[passage.id for passage in hits] for hits in batch] == [["it"], [], ["fr"]]


@pytest.mark.parametrize("k", [1000, 1 << 62])
def test_k_above_the_number_of_passages_gives_what_there_is(engine, k):
    assert ids(engine, "capital", k) == ["fr", "it"]


def test_bad_requests(engine):
    with pytest.raises(ValueError, match="`k` is 0, but must be a whole number, at least 1"):
        engine.search_batch(["Rome"], 0)
    with pytest.raises(TypeError, match="queries must be a sequence"):
        engine.search_batch("Rome", 1)


words = st.lists(st.sampled_from(["red", "green", "blue", "cat", "dog", "of"]), max_size=6).map(" ".join)


@settings(deadline=None, max_examples=25)
@given(texts=st.lists(words, min_size=1, max_size=8), query=words)
def test_it_finds_what_bm25_finds(tmp_path_factory, texts, query):
    directory = tmp_path_factory.mktemp("index")
    found = build(directory, *texts, "cat").search_batch([query], 100)[0]
    reference = BM25Index.build(directory / "corpus.jsonl", directory / "bm25", show_progress=False)
    assert {hit.id for hit in found} == set(ids(reference, query, k=100))
    assert found == sorted(found, key=lambda hit: (-hit.score, int(hit.id)))


@pytest.mark.parametrize("k", range(1, 9))
def test_ties_keep_the_order_of_the_corpus_in_any_order_of_segments(k):
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
    hits = best_hits(index.searcher(), query, k)
    found = index.searcher().fast_field_values("position", [address for _, address in hits])
    assert found == [4, 1, 2, 3, 5, 6][:k]


def test_titles_and_odd_text_come_back_exactly(tmp_path):
    odd = [Passage('"\\ id', '"quoted"\n', "\x00 \u2028 \U0001f600 needle"), Passage("", "", "needle")]
    write_corpus(odd, tmp_path / "corpus.jsonl")
    index = TantivyIndex.build(tmp_path / "corpus.jsonl", tmp_path / "index", show_progress=False)
    assert {replace(hit, score=None) for hit in index.search_batch(["needle"], 3)[0]} == set(odd)


def test_copies_answer_alike(engine):
    for twin in (pickle.loads(pickle.dumps(engine)), copy.deepcopy(engine)):
        assert twin.search_batch(["capital"], 3) == engine.search_batch(["capital"], 3)
        assert twin.identity == engine.identity


def test_open_builds_then_loads_for_its_corpus_only(tmp_path, monkeypatch):
    build(tmp_path, "Oslo lies in Norway")
    monkeypatch.setattr(TantivyIndex, "build", lambda *_: pytest.fail("built again"))
    assert ids(TantivyIndex.open(tmp_path / "corpus.jsonl", tmp_path / "index"), "oslo") == ["0"]
    write_corpus([Passage("0", "", "Lima lies in Peru")], tmp_path / "corpus.jsonl")
    with pytest.raises(IndexOutdated, match=r"index .*index: .*another content than .*corpus\.jsonl"):
        TantivyIndex.open(tmp_path / "corpus.jsonl", tmp_path / "index")


def test_open_builds_where_there_is_none(corpus_path, tmp_path, capsys):
    assert ids(TantivyIndex.open(corpus_path, tmp_path / "index"), "rome") == ["it"]
    assert "Reading passages" in capsys.readouterr().err


def test_a_failed_build_leaves_nothing(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "contents": "T\\nt"}\n{\n')
    with pytest.raises(CorpusError, match=r"corpus.jsonl, line 2"):
        TantivyIndex.build(tmp_path / "corpus.jsonl", tmp_path / "indexes/index", show_progress=False)
    assert list((tmp_path / "indexes").iterdir()) == []


def test_without_tantivy_the_error_says_what_to_install(corpus_path, tantivy_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tantivy", None)
    with pytest.raises(ImportError, match=r"pip install 'sorl-trl\[tantivy\]'"):
        TantivyIndex.build(corpus_path, tmp_path / "index")
    with pytest.raises(ImportError, match=r"pip install 'sorl-trl\[tantivy\]'"):
        TantivyIndex.load(tantivy_dir)


def files(directory):
    return sorted((directory / "tantivy").glob("*[!k]"))


def test_the_manifest_names_every_file_less_the_locks(tantivy_dir):
    recorded = json.loads((tantivy_dir / "manifest.json").read_text())["files"]
    assert {tantivy_dir / name for name in recorded} == {*files(tantivy_dir), tantivy_dir / "tantivy/.managed.json"}


def test_a_flipped_bit_in_any_small_file_is_found(copied_dir):
    for path in files(copied_dir):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(IndexCorrupted, match=f"{path.name} has changed"):
            TantivyIndex.load(copied_dir)
        path.write_bytes(content)
    TantivyIndex.load(copied_dir)


def test_large_files_are_checked_by_size(copied_dir, monkeypatch):
    monkeypatch.setattr(module, "HASHED_BYTES", 0)
    store = next((copied_dir / "tantivy").glob("*.store"))
    monkeypatch.setattr("sorl_trl.search.engines.manifest.fingerprint", lambda path: pytest.fail(f"hashed {path}"))
    TantivyIndex.load(copied_dir)
    store.write_bytes(store.read_bytes() + b"\0")
    with pytest.raises(IndexCorrupted, match=r"\.store has changed"):
        TantivyIndex.load(copied_dir)


@pytest.mark.parametrize("name", ["meta.json", "*.store", "*.term"])
def test_a_missing_file_is_found(copied_dir, name):
    next((copied_dir / "tantivy").glob(name)).unlink()
    with pytest.raises(IndexCorrupted, match="is missing"):
        TantivyIndex.load(copied_dir)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_documents": 8}, "7 passages, 8 in the manifest"),
        ({"library": "tantivy 0.1"}, "library 'tantivy 0.1', installed is 'tantivy 0"),
        ({"files": {}}, "meta.json has changed: manifest.json says None"),
    ],
)
def test_a_manifest_that_does_not_fit_is_found(copied_dir, changes, message):
    manifest = json.loads((copied_dir / "manifest.json").read_text())
    (copied_dir / "manifest.json").write_text(json.dumps(manifest | changes))
    with pytest.raises(IndexCorrupted, match=message):
        TantivyIndex.load(copied_dir)


def test_what_tantivy_cannot_open_is_named(copied_dir):
    (copied_dir / "tantivy/meta.json").write_text("{}")
    manifest = module.Manifest("tantivy", module.library_series("tantivy"), 7, [])
    module.write_manifest(copied_dir, ["tantivy/meta.json"], manifest)
    with pytest.raises(IndexCorrupted, match="tantivy cannot open it"):
        TantivyIndex.load(copied_dir)


def test_another_engines_index_is_named(index_dir):
    with pytest.raises(ValueError, match=r"made by the engine 'bm25', not 'tantivy'; use `open_index`"):
        TantivyIndex.load(index_dir)
