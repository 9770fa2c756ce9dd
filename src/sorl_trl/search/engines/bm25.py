"""BM25 over a corpus file, in one folder that every process maps into memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from sorl_trl.search.backend import check_request
from sorl_trl.search.corpus import Corpus, CorpusError, write_corpus
from sorl_trl.search.engines.saved import CORPUS, Manifest, SavedIndex, read_manifest
from sorl_trl.search.engines.tokenize import tokenize
from sorl_trl.types import Passage

_modules: dict[str, Any] = sys.modules
if "jax" in _modules:
    import bm25s
else:  # bm25s starts JAX where it is installed, which takes three quarters of a GPU's memory; nothing here needs it
    _modules["jax"] = None
    import bm25s

    del _modules["jax"]


class BM25Index(SavedIndex):
    """A `SearchBackend` for up to about a million passages: bm25s's scores (Lucene's BM25, k1 = 1.5, b = 0.75).

    It searches title and text. Only passages that share a token with the query are hits. Equal scores keep the order
    of the corpus, so the same query always finds the same passages. A repeated token counts once, so that a policy
    that repeats itself cannot slow the search down.

    Make it with `build` or `load`. The index folder has the passages, too: the corpus file is not needed afterwards.
    """

    engine: ClassVar[str] = "bm25"

    def __init__(self, scorer: bm25s.BM25, corpus: Corpus, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._scorer = scorer
        self._corpus = corpus

    @classmethod
    def load(cls, index_dir: str | os.PathLike[str]) -> BM25Index:
        """See `SavedIndex.load`. The files are mapped into memory, which processes on one machine share."""
        manifest = read_manifest(Path(index_dir), cls.engine)
        scorer = bm25s.BM25.load(index_dir, mmap=True, allow_pickle=False)
        return cls(scorer, Corpus(Path(index_dir) / CORPUS), manifest)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_request(queries, k)
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> list[Passage]:
        vocabulary = self._scorer.vocab_dict
        scores = self._scorer.get_scores_from_ids(sorted({vocabulary[t] for t in tokenize(query) if t in vocabulary}))
        hits = np.flatnonzero(scores)
        best = hits[top_k(scores[hits], k)]
        return [replace(self._corpus[index], score=scores.item(index)) for index in best.tolist()]

    @staticmethod
    def _write(passages: Iterable[Passage], directory: Path, show_progress: bool) -> int:
        """See `SavedIndex.build`. It holds the tokens of the whole corpus in memory."""
        write_corpus(passages, directory / CORPUS)
        corpus = Corpus(directory / CORPUS)  # Index what was written, because a source may change meanwhile.
        token_ids, vocabulary = _encode(corpus, show_progress)
        if not vocabulary:
            raise CorpusError("corpus: no passage holds a letter or digit outside the stop words")
        scorer = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        scorer.index((token_ids, vocabulary), create_empty_token=False, show_progress=show_progress)
        scorer.save(directory)
        return len(corpus)


def top_k(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.intp]:
    """The indices of the `k` highest scores, best first, equal scores in index order; `scores` is (N,)."""
    kept = np.arange(len(scores))
    if len(scores) > k:
        # Keep all that tie with the k-th highest, so that the sort below decides between them, not chance.
        kept = np.flatnonzero(scores >= np.partition(scores, -k)[-k])
    return kept[np.argsort(-scores[kept], kind="stable")[:k]]


def _encode(corpus: Corpus, show_progress: bool) -> tuple[list[list[int]], dict[str, int]]:
    """Token ids of every passage, and the vocabulary, whose ids are in order of appearance, the same in every run."""
    vocabulary: dict[str, int] = {}
    token_ids = [
        [vocabulary.setdefault(token, len(vocabulary)) for token in tokenize(f"{passage.title}\n{passage.text}")]
        for passage in tqdm(corpus, desc="Splitting into tokens", total=len(corpus), disable=not show_progress)
    ]
    return token_ids, vocabulary
