from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.search.backends import PASSAGES
from transformers import AutoModel, AutoTokenizer

from sorl_trl.search import DenseIndex, DenseOptions
from sorl_trl.search import dense as dense_module


@pytest.fixture(scope="module")
def options(embedder):
    return DenseOptions(model=str(embedder))


@pytest.fixture(scope="module")
def dense_dir(corpus_path, options, tmp_path_factory):
    directory = tmp_path_factory.mktemp("indexes") / "dense"
    DenseIndex.build(corpus_path, directory, False, options)
    return directory


@pytest.fixture(scope="module")
def dense(dense_dir):
    return DenseIndex.load(dense_dir)


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


def test_one_answer_per_query_in_order(dense):
    alone = [[hit.id for hit in dense.search_batch([query], 2)[0]] for query in ("Rome", "Paris")]
    batch = [[hit.id for hit in hits] for hits in dense.search_batch(["Rome", " \n", "", "Paris"], 2)]
    assert batch == [alone[0], [], [], alone[1]]
    assert dense.search_batch([], 2) == []


def test_passages_are_embedded_in_blocks(corpus_path, options, dense_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(dense_module, "ENCODED_AT_ONCE", 2)
    DenseIndex.build(corpus_path, tmp_path / "blocks", False, options)
    np.testing.assert_allclose(np.load(tmp_path / "blocks/vectors.npy"), np.load(dense_dir / "vectors.npy"), atol=1e-6)
