"""Whichever way the best passages are found, they are those of a full sort, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from sorl_trl.search.engines import postings as module
from sorl_trl.search.engines.postings import Postings, top_k

TOKENS = "abcdef"
tokens = st.lists(st.sampled_from([*TOKENS, "unknown"]), max_size=8)
scores_of = st.one_of(
    st.floats(0.0625, 8, width=32),
    st.sampled_from([0.5, 1.0, 1.5]),  # so that many are equal
)


@st.composite
def matrices(draw):
    """Postings over up to 300 passages: more than there are rows, in numbers that rows do not divide."""
    num_documents = draw(st.integers(1, 300))
    passage = st.integers(0, num_documents - 1)
    columns = [draw(st.dictionaries(passage, scores_of, min_size=1, max_size=40)) for _ in TOKENS]
    data = np.array([column[i] for column in columns for i in sorted(column)], dtype=np.float32)
    indices = np.array([i for column in columns for i in sorted(column)], dtype=np.int32)
    indptr = np.cumsum([0, *map(len, columns)])
    return Postings(data, indices, indptr, {token: i for i, token in enumerate(TOKENS)}, num_documents)


def by_full_sort(postings: Postings, query: list[str], k: int) -> list[tuple[int, float]]:
    """One float32 addition after the other, in the order of the columns."""
    scores = np.zeros(postings.num_documents, dtype=np.float32)
    for column in sorted({postings.vocabulary[token] for token in query if token in postings.vocabulary}):
        for place in range(postings.indptr[column], postings.indptr[column + 1]):
            scores[postings.indices[place]] += postings.data[place]
    best = sorted((-score, i) for i, score in enumerate(scores.tolist()) if score > 0)
    return [(i, -score) for score, i in best[:k]]


@pytest.mark.parametrize("sparse", [0, 10**9])  # only the passages that are hit are scored; all are
@settings(deadline=None, max_examples=150)
@given(postings=matrices(), query=tokens, k=st.sampled_from([1, 2, 3, 5, 7, 100, 1000]))
def test_the_best_are_those_of_a_full_sort(postings, query, k, sparse):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SPARSE", sparse)
        found = postings.best(query, k)
    assert found == by_full_sort(postings, query, k)
    assert all(isinstance(i, int) and isinstance(score, float) for i, score in found)


def test_all_passages_equal():
    """1,000 ties, of which the first are taken."""
    postings = Postings(np.ones(1000, np.float32), np.arange(1000), np.array([0, 1000]), {"a": 0}, 1000)
    assert postings.best(["a"], 3) == [(0, 1.0), (1, 1.0), (2, 1.0)]
    assert len(postings.best(["a"], 2000)) == 1000


@settings(deadline=None)
@given(
    scores=npst.arrays(np.float32, st.integers(0, 200), elements=st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])),
    k=st.integers(1, 210),
)
def test_top_k_equals_a_full_sort(scores, k):
    assert top_k(scores, k).tolist() == sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
