from __future__ import annotations

import json
import pickle
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tests.unit.search.passages import PASSAGES
from transformers import AutoModel, AutoTokenizer

from sorl_trl.search import CorpusError, IndexCorrupted
from sorl_trl.search.engines import dense as dense_module
from sorl_trl.search.engines.dense import DenseIndex, nearest
from sorl_trl.search.engines.encoder import DenseOptions, Encoder
from sorl_trl.search.engines.manifest import read_manifest, write_manifest


@pytest.fixture(scope="module")
def options(embedder):
    return DenseOptions(model=str(embedder), batch_size=3, device="cpu")


@pytest.fixture(scope="module")
def dense_dir(corpus_path, options, tmp_path_factory):
    directory = tmp_path_factory.mktemp("indexes") / "dense"
    DenseIndex.build(corpus_path, directory, options, show_progress=False)
    return directory


@pytest.fixture(scope="module")
def dense(dense_dir):
    return DenseIndex.load(dense_dir, device="cpu")


@pytest.fixture
def copy(dense_dir, tmp_path):
    return shutil.copytree(dense_dir, tmp_path / "copy")


def embed(embedder, texts):
    """Mean over the tokens, length 1: by transformers alone, one text at a time."""
    model, tokenizer = AutoModel.from_pretrained(embedder).eval(), AutoTokenizer.from_pretrained(embedder)
    with torch.no_grad():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(states), dim=-1)


def test_scores_are_cosines_of_mean_states_with_prefixes(embedder, dense):
    texts = [f'passage: "{p.title}"\n{p.text}' if p.title else f"passage: {p.text}" for p in PASSAGES]
    queries = ["capital Paris", "Gemini"]
    expected = embed(embedder, [f"query: {query}" for query in queries]) @ embed(embedder, texts).T
    for hits, scores in zip(dense.search_batch(queries, 7), expected, strict=True):
        found = {hit.id: hit.score for hit in hits}
        assert found == pytest.approx(dict(zip((p.id for p in PASSAGES), scores.tolist(), strict=True)), abs=1e-5)
        assert [hit.score for hit in hits] == sorted(found.values(), reverse=True)


def test_hits_carry_the_passage(dense):
    [hits] = dense.search_batch(["France"], 2)
    assert len(hits) == 2
    assert {replace(hit, score=None) for hit in hits} < set(PASSAGES)


def test_equal_passages_keep_the_order_of_the_corpus(dense):
    ids = [hit.id for hit in dense.search_batch(["Gemini stars"], 7)[0]]
    assert ids.index("twin1") + 1 == ids.index("twin2")


def test_one_answer_per_query_in_order(dense):
    alone = [[hit.id for hit in dense.search_batch([query], 2)[0]] for query in ("Rome", "Paris")]
    batch = [[hit.id for hit in hits] for hits in dense.search_batch(["Rome", " \n", "", "Paris"], 2)]
    assert batch == [alone[0], [], [], alone[1]]
    assert dense.search_batch([], 2) == []


@pytest.mark.parametrize("query", ["\ud800", "\x00", "unknown words", "[PAD]", "x" * 100_000, "東京"])
def test_any_query_is_served(dense, query):
    assert len(dense.search_batch([query], 3)[0]) == 3


def test_k_above_the_corpus_gives_all(dense):
    assert len(dense.search_batch(["Rome"], 1000)[0]) == len(dense) == len(PASSAGES)


def test_bad_requests(dense):
    with pytest.raises(ValueError, match="`k` is 0, but must be a whole number, at least 1"):
        dense.search_batch(["Rome"], 0)
    with pytest.raises(TypeError, match="queries must be a sequence"):
        dense.search_batch("Rome", 1)


def test_a_built_a_loaded_and_a_copied_index_agree(corpus_path, options, dense, tmp_path):
    built = DenseIndex.build(corpus_path, tmp_path / "again", options, show_progress=False)
    copied = pickle.loads(pickle.dumps(built))
    assert built.identity == dense.identity == copied.identity
    assert dense.identity.startswith("dense-")
    expected = dense.search_batch(["capital"], 3)
    assert built.search_batch(["capital"], 3) == expected == copied.search_batch(["capital"], 3)


def test_identity_knows_the_prefixes(corpus_path, options, dense, tmp_path):
    other = DenseIndex.build(corpus_path, tmp_path / "i", replace(options, query_prefix=""), show_progress=False)
    assert other.identity != dense.identity


def test_passages_are_embedded_in_blocks(corpus_path, options, dense_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(dense_module, "ENCODED_AT_ONCE", 2)
    DenseIndex.build(corpus_path, tmp_path / "blocks", options, show_progress=False)
    np.testing.assert_allclose(np.load(tmp_path / "blocks/vectors.npy"), np.load(dense_dir / "vectors.npy"), atol=1e-6)


def test_what_is_missing_is_named(corpus_path, options, tmp_path, monkeypatch):
    with pytest.raises(OSError, match=r"model must be a Hub id .*, got '.*nowhere'"):
        DenseIndex.build(corpus_path, tmp_path / "a", replace(options, model=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="`batch_size` is 0, but must be a whole number, at least 1"):
        DenseOptions(batch_size=0)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(CorpusError, match="the corpus is empty"):
        DenseIndex.build(tmp_path / "empty.jsonl", tmp_path / "b", options, show_progress=False)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'sorl-trl\[dense\]'"):
        DenseIndex.build(corpus_path, tmp_path / "c", options)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.jsonl"]


def resign(directory, **changes):
    """Write the manifest anew over changed files: only the checks beyond the hash are left."""
    write_manifest(directory, ("corpus.jsonl", "vectors.npy"), replace(read_manifest(directory), **changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v[:-1], r"vectors of float32 \(6, 16\), expected float32 \(7, 16\)"),
        (lambda v: v[:, :-1], r"vectors of float32 \(7, 15\)"),
        (lambda v: v.astype(np.float64), "vectors of float64"),
        (lambda v: v.astype(object), "do not fit together"),
        (lambda v: -v, r"is not the one that made the vectors.* -1\.000, allowed from 0\.99"),
    ],
)
def test_vectors_that_do_not_fit_are_found_even_if_signed(copy, change, message):
    np.save(copy / "vectors.npy", change(np.load(copy / "vectors.npy")), allow_pickle=True)
    resign(copy)
    with pytest.raises(IndexCorrupted, match=message):
        DenseIndex.load(copy)


def test_another_model_in_the_same_folder_is_found(copy, embedder, tmp_path):
    other = shutil.copytree(embedder, tmp_path / "other")
    model = AutoModel.from_pretrained(other)
    torch.nn.init.normal_(model.embeddings.word_embeddings.weight)
    model.save_pretrained(other)
    resign(copy, settings=DenseOptions(str(other)).settings)
    with pytest.raises(IndexCorrupted, match=r"the model .*other is not the one that made the vectors"):
        DenseIndex.load(copy)


def test_settings_that_are_none_are_found(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"settings": {"model": "m"}}))
    with pytest.raises(IndexCorrupted, match=r"settings \{'model': 'm'\} are not those of a model"):
        DenseIndex.load(copy)


vectors = npst.arrays(
    np.float32, st.tuples(st.integers(1, 12), st.just(2)), elements=st.sampled_from([-1.0, 0.0, 0.5, 1.0])
)


@settings(deadline=None)
@given(rows=vectors, queries=vectors, k=st.integers(1, 14), at_once=st.integers(1, 40))
def test_nearest_equals_a_full_sort_in_blocks_of_any_size(rows, queries, k, at_once):
    expected = [sorted(enumerate((rows @ query).tolist()), key=lambda hit: (-hit[1], hit[0]))[:k] for query in queries]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_module, "SCORES_AT_ONCE", at_once)
        assert nearest(torch.from_numpy(rows), torch.from_numpy(queries), k) == expected


def test_a_model_that_overflows_is_an_error(options, monkeypatch):
    encoder = Encoder(options)
    monkeypatch.setattr(encoder._model, "encode", lambda texts, **_: np.full((len(texts), 4), np.nan))
    with pytest.raises(ValueError, match="not finite"):
        encoder.queries(["a"])
