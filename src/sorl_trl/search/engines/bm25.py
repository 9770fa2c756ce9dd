"""The embedded search engine: BM25 over a corpus file, in one directory that every process maps into memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import bm25s
from tqdm.auto import tqdm

from sorl_trl.search.backend import check_request
from sorl_trl.search.corpus import Corpus, CorpusError, CorpusPaths, write_corpus
from sorl_trl.search.engines.manifest import Manifest, check_manifest
from sorl_trl.search.engines.postings import Postings
from sorl_trl.search.engines.saved import CORPUS, SavedIndex, write_index
from sorl_trl.search.engines.tokenize import tokenize
from sorl_trl.types import Passage


class BM25Index(SavedIndex):
    """A `SearchBackend` for up to about a million passages: bm25s's scores (Lucene's BM25, k1 = 1.5, b = 0.75).

    Title and text are searched. Only passages that share a token with the query are hits; equal scores keep the order
    of the corpus, so the same query always gives the same passages. A token that a query repeats counts once, so that
    a policy that repeats itself cannot slow the search down.

    Made by `build` or `load`. The index directory holds the passages too: the corpus file is not needed afterwards.
    """

    engine: ClassVar[str] = "bm25"

    def __init__(self, postings: Postings, corpus: Corpus, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._postings = postings
        self._corpus = corpus

    @classmethod
    def build(
        cls, corpus_path: CorpusPaths, index_dir: str | os.PathLike[str], show_progress: bool = True
    ) -> BM25Index:
        """See `SavedIndex.build`. It holds the tokens of the whole corpus in memory."""
        write_index(cls.engine, corpus_path, index_dir, _write, show_progress)
        return cls.load(index_dir)

    @classmethod
    def load(cls, index_dir: str | os.PathLike[str]) -> BM25Index:
        """See `SavedIndex.load`. The files are mapped into memory, which processes on one machine share."""
        manifest = check_manifest(Path(index_dir), cls.engine)
        postings = Postings.of(bm25s.BM25.load(index_dir, mmap=True, allow_pickle=False))
        return cls(postings, Corpus(Path(index_dir) / CORPUS), manifest)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SavedIndex.search_batch`."""
        check_request(queries, k)
        # One kind of work after the other, which finds its code and tables in the processor's caches.
        tokens = [tokenize(query) for query in queries]
        found = [self._postings.best(words, k) for words in tokens]
        return [[replace(self._corpus[index], score=score) for index, score in best] for best in found]


def _write(passages: Iterable[Passage], directory: Path, show_progress: bool) -> int:
    write_corpus(passages, directory / CORPUS)
    corpus = Corpus(directory / CORPUS)  # What is indexed is what was written, even if a source changes meanwhile.
    token_ids, vocabulary = _encode(corpus, show_progress)
    if not vocabulary:
        raise CorpusError("corpus: no passage holds a letter or digit outside the stop words")
    scorer = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    scorer.index((token_ids, vocabulary), create_empty_token=False, show_progress=show_progress)
    scorer.save(directory)
    return len(corpus)


def _encode(corpus: Corpus, show_progress: bool) -> tuple[list[list[int]], dict[str, int]]:
    """Token ids of every passage, and the vocabulary: ids in order of appearance, hence the same in every run."""
    vocabulary: dict[str, int] = {}
    token_ids = [
        [vocabulary.setdefault(token, len(vocabulary)) for token in tokenize(f"{passage.title}\n{passage.text}")]
        for passage in tqdm(corpus, desc="Splitting into tokens", total=len(corpus), disable=not show_progress)
    ]
    return token_ids, vocabulary
