from __future__ import annotations

import math
import os
import subprocess
import sys

import bm25s
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from sorl_trl.search import BM25Index, write_corpus
from sorl_trl.search.engines.bm25 import top_k
from sorl_trl.search.engines.tokenize import tokenize
from sorl_trl.types import Passage


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


def test_ties_keep_the_order_of_the_corpus(tmp_path):
    [hits] = build(tmp_path, *["same words"] * 50).search_batch(["words"], 3)
    assert [hit.id for hit in hits] == ["0", "1", "2"]


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
    for path in index_dir.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


@settings(deadline=None)
@given(
    scores=npst.arrays(np.float32, st.integers(0, 200), elements=st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])),
    k=st.integers(1, 210),
)
def test_top_k_equals_a_full_sort(scores, k):
    assert top_k(scores, k).tolist() == sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def test_jax_is_left_alone(tmp_path):
    """bm25s would start it, and a started JAX takes three quarters of a GPU's memory."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").touch()
    (tmp_path / "jax/lax.py").write_text("top_k = print\n")
    script = "import sys, sorl_trl.search.engines.bm25; assert 'jax' not in sys.modules; import jax.lax"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-500:]
