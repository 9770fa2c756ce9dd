"""The arithmetic of the embedded engine: from the tokens of a query to its best passages, in numpy alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import bm25s
import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float32]
Indices = npt.NDArray[np.integer]
Column = tuple[Indices, Scores]
"""The passages that hold a token, and what it adds to the score of each."""

SPARSE = 64
"""With fewer postings to score than one in so many passages, only the passages that they hit are scored (ours: where
both ways take as long at 100,000 passages)."""
ROWS = 64
"""Into how many rows the scores of all passages are folded (ours: from 32 to 256 it makes no difference)."""
FEW = 64
"""So many scores are sorted at once sooner than the best of them are found first (ours)."""


@dataclass(frozen=True)
class Postings:
    """What each token adds to the score of each passage that holds it: a sparse matrix, column by column.

    Attributes:
        data: (P,) float32; those of token t are `data[indptr[t]:indptr[t + 1]]`.
        indices: (P,) the passages that they belong to, none of them twice in one column.
        indptr: (V + 1,) where the columns begin, and where the last one ends.
        vocabulary: Token -> column.
        num_documents: The number of passages.
    """

    data: Scores
    indices: Indices
    indptr: Indices
    vocabulary: dict[str, int]
    num_documents: int

    @classmethod
    def of(cls, scorer: bm25s.BM25) -> Postings:
        """Take the postings of a bm25s index.

        Raises:
            ValueError: The matrix is not as described: numpy would take an index of -1 for the last passage.
        """
        # Plain views: a slice of a `np.memmap` is another one, which takes longer to make than to read.
        data, indices, indptr = (np.asarray(scorer.scores[name]) for name in ("data", "indices", "indptr"))
        postings = cls(data, indices, indptr, scorer.vocab_dict, scorer.scores["num_docs"])
        postings._check()
        return postings

    def best(self, tokens: Iterable[str], k: int) -> list[tuple[int, float]]:
        """The `k` best passages and their scores, best first, equal scores in the order of the passages.

        A token counts once; only passages that hold one are hits. Scores are summed in float32 in the order of the
        columns. Which of two ways is taken is a matter of time alone: both give the same hits and scores.
        """
        known = sorted({self.vocabulary[token] for token in tokens if token in self.vocabulary})
        if not known:
            return []
        start = self.indptr.item
        spans = [slice(start(column), start(column + 1)) for column in known]
        columns = [(self.indices[span], self.data[span]) for span in spans]
        if SPARSE * sum(len(passages) for passages, _ in columns) < self.num_documents:
            hits, scores = _score_hits(columns)
        else:
            hits, scores = _score_all(columns, self.num_documents, k)
        best = top_k(scores, k)
        return list(zip(hits[best].tolist(), scores[best].tolist(), strict=True))

    def _check(self) -> None:
        data, indices, indptr = self.data, self.indices, self.indptr
        if not len(data) == len(indices) == indptr[-1] or indptr[0] != 0 or np.any(np.diff(indptr) < 0):
            raise ValueError("posting lists out of bounds")
        if indices.min(initial=0) < 0 or indices.max(initial=0) >= self.num_documents:
            raise ValueError("document index out of bounds")
        if sorted(self.vocabulary.values()) != list(range(len(indptr) - 1)):
            raise ValueError("vocabulary out of bounds")


def top_k(scores: Scores, k: int) -> npt.NDArray[np.intp]:
    """The indices of the `k` highest scores, best first, equal scores in index order; `scores` is (N,)."""
    if len(scores) <= max(FEW, k):
        return np.argsort(-scores, kind="stable")[:k]
    # Whatever ties with the k-th highest stays in, so that the sort below decides between them, not chance.
    kept = np.flatnonzero(scores >= np.partition(scores, -k)[-k])
    return kept[np.argsort(-scores[kept], kind="stable")[:k]]


def _score_hits(columns: Sequence[Column]) -> tuple[Indices, Scores]:
    """The passages in the columns, in order, and their scores."""
    hits, places = np.unique(np.concatenate([passages for passages, _ in columns]), return_inverse=True)
    scores = np.zeros(len(hits), dtype=np.float32)
    np.add.at(scores, places, np.concatenate([data for _, data in columns]))
    return hits, scores


def _score_all(columns: Sequence[Column], num_documents: int, k: int) -> tuple[Indices, Scores]:
    """The passages that may be among the `k` best, in order, and their scores.

    All are scored, in an array folded into rows. The k-th highest of its columns' highest scores is a number that at
    least `k` passages reach, and few others do: to look for them in the columns that hold one takes less time than to
    partition the scores, on which, for most of them are zero, numpy is slow.
    """
    grid = np.zeros((ROWS, -(-num_documents // ROWS)), dtype=np.float32)
    scores, width = grid.reshape(-1), grid.shape[1]
    for passages, data in columns:
        np.add.at(scores, passages.astype(np.intp), data)  # which any other type of index slows down
    highest = np.maximum.reduce(grid, axis=0)
    bound = np.partition(highest, -k)[-k] if k <= width else 0
    if bound <= 0:
        hits = scores.nonzero()[0]
    else:
        chosen = (highest >= bound).nonzero()[0]
        rows, places = (grid.take(chosen, axis=1) >= bound).nonzero()
        hits = rows * width + chosen[places]
    return hits, scores[hits]
