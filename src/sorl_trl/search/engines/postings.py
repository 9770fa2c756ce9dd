"""The arithmetic of the embedded engine: from the tokens of a query to its best passages, in numpy alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import bm25s
import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float32]
Indices = npt.NDArray[np.integer]


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
        """Take the postings of a bm25s index."""
        # Plain views: a slice of a `np.memmap` is another one, which takes longer to make than to read.
        data, indices, indptr = (np.asarray(scorer.scores[name]) for name in ("data", "indices", "indptr"))
        return cls(data, indices, indptr, scorer.vocab_dict, scorer.scores["num_docs"])

    def best(self, tokens: Iterable[str], k: int) -> list[tuple[int, float]]:
        """The `k` best passages and their scores, best first, equal scores in the order of the passages.

        A token counts once; only passages that hold one are hits. Scores are summed in float32 in the order of the
        columns.
        """
        known = sorted({self.vocabulary[token] for token in tokens if token in self.vocabulary})
        scores = np.zeros(self.num_documents, dtype=np.float32)
        for column in known:
            span = slice(self.indptr.item(column), self.indptr.item(column + 1))
            scores[self.indices[span]] += self.data[span]
        # Nearly all scores are zero, on which a partition is slow: only the hits go into it.
        hits = np.flatnonzero(scores)
        best = hits[top_k(scores[hits], k)]
        return list(zip(best.tolist(), scores[best].tolist(), strict=True))


def top_k(scores: Scores, k: int) -> npt.NDArray[np.intp]:
    """The indices of the `k` highest scores, best first, equal scores in index order; `scores` is (N,)."""
    kept = np.arange(len(scores))
    if len(scores) > k:
        # Whatever ties with the k-th highest stays in, so that the sort below decides between them, not chance.
        kept = np.flatnonzero(scores >= np.partition(scores, -k)[-k])
    return kept[np.argsort(-scores[kept], kind="stable")[:k]]
