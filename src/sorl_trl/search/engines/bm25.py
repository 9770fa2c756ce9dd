"""The embedded search engine: BM25 over a corpus file, in one directory that every process maps into memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import bm25s
from tqdm.auto import tqdm

from sorl_trl.search.checks import check_request
from sorl_trl.search.corpus import Corpus, CorpusPaths, corpus_files, read_passages, write_corpus
from sorl_trl.search.engines.manifest import (
    IndexCorrupted,
    Manifest,
    check_manifest,
    fingerprint,
    library_series,
    write_manifest,
)
from sorl_trl.search.engines.postings import Postings
from sorl_trl.search.engines.saved import CORPUS, open_or_build, staged
from sorl_trl.search.engines.tokenize import tokenize
from sorl_trl.types import Passage

INDEX_FILES = (
    CORPUS,
    "data.csc.index.npy",
    "indices.csc.index.npy",
    "indptr.csc.index.npy",
    "params.index.json",
    "vocab.index.json",
)


class BM25Index:
    """A `SearchBackend` for up to about a million passages: bm25s's scores (Lucene's BM25, k1 = 1.5, b = 0.75).

    Title and text are searched. Only passages that share a token with the query are hits; equal scores keep the order
    of the corpus, so the same query always gives the same passages. A token that a query repeats counts once, so that
    a policy that repeats itself cannot slow the search down.

    Made by `build` or `load`. The index directory holds the passages too: the corpus file is not needed afterwards.
    """

    thread_safe = True

    engine: ClassVar[str] = "bm25"

    def __init__(self, postings: Postings, corpus: Corpus, identity: str) -> None:
        self._postings = postings
        self._corpus = corpus
        self._identity = identity

    @classmethod
    def build(
        cls, corpus_path: CorpusPaths, index_dir: str | os.PathLike[str], show_progress: bool = True
    ) -> BM25Index:
        """Index a corpus into a new directory, and load it.

        The directory is written under another name and renamed when complete: it is there as a whole or not at all.

        Args:
            corpus_path: The corpus, as `corpus_files` finds it.
            index_dir: The directory to make; its parents are made where missing.
            show_progress: Show progress bars on stderr.

        Raises:
            CorpusError: The corpus is empty or a line is not a passage.
            FileExistsError: There is already something at `index_dir`.
            ValueError: No passage holds a token.
        """
        with staged(index_dir) as directory:
            _write_index(corpus_files(corpus_path), directory, show_progress)
        return cls.load(index_dir)

    @classmethod
    def open(cls, corpus_path: CorpusPaths, index_dir: str | os.PathLike[str]) -> BM25Index:
        """Load the index of a corpus, and build it first where there is none.

        Raises:
            IndexOutdated: The index at `index_dir` was built from another content than the corpus has now.
            CorpusError, IndexCorrupted, ValueError: As `build` and `load` do.
        """
        return open_or_build(cls, corpus_path, index_dir)

    @classmethod
    def load(cls, index_dir: str | os.PathLike[str]) -> BM25Index:
        """Check every file of an index directory against its manifest, and map them into memory.

        Raises:
            FileNotFoundError: There is no such directory.
            IndexCorrupted: A file is missing, changed, of another version or inconsistent.
            ValueError: Another engine made it.
        """
        index_dir = Path(index_dir)
        manifest = check_manifest(index_dir, cls.engine, library_series("bm25s"), INDEX_FILES)
        try:
            postings = Postings.of(bm25s.BM25.load(index_dir, mmap=True, allow_pickle=False))
            corpus = Corpus(index_dir / CORPUS)
            _check_sizes(len(corpus), postings.num_documents, manifest.num_documents)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise IndexCorrupted(index_dir, f"the files do not fit together ({error})") from error
        return cls(postings, corpus, manifest.identity)

    @property
    def identity(self) -> str:
        """See `SavedIndex.identity`."""
        return self._identity

    def __len__(self) -> int:
        return len(self._corpus)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Gives fewer than `k` passages, or none, where there are no more hits."""
        check_request(queries, k)
        # One kind of work after the other, which finds its code and tables in the processor's caches.
        tokens = [tokenize(query) for query in queries]
        found = [self._postings.best(words, k) for words in tokens]
        return [[self._passage(index, score) for index, score in best] for best in found]

    def _passage(self, index: int, score: float) -> Passage:
        passage = self._corpus[index]
        return Passage(passage.id, passage.title, passage.text, score)


def _write_index(files: Sequence[Path], directory: Path, show_progress: bool) -> None:
    sources = [fingerprint(file) for file in files]
    write_corpus(read_passages(files, show_progress), directory / CORPUS)
    corpus = Corpus(directory / CORPUS)  # What is indexed is what was written, even if a source changes meanwhile.
    token_ids, vocabulary = _encode(corpus, show_progress)
    if not vocabulary:
        raise ValueError(
            f"corpus_path {', '.join(map(str, files))}: no passage holds a letter or digit outside the stop words"
        )
    scorer = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    scorer.index((token_ids, vocabulary), create_empty_token=False, show_progress=show_progress)
    scorer.save(directory)
    manifest = Manifest(BM25Index.engine, library_series("bm25s"), len(corpus), sources)
    write_manifest(directory, INDEX_FILES, manifest)


def _encode(corpus: Corpus, show_progress: bool) -> tuple[list[list[int]], dict[str, int]]:
    """Token ids of every passage, and the vocabulary: ids in order of appearance, hence the same in every run."""
    vocabulary: dict[str, int] = {}
    token_ids = [
        [vocabulary.setdefault(token, len(vocabulary)) for token in tokenize(f"{passage.title}\n{passage.text}")]
        for passage in tqdm(corpus, desc="Splitting into tokens", total=len(corpus), disable=not show_progress)
    ]
    return token_ids, vocabulary


def _check_sizes(passages: int, scored: int, in_manifest: int) -> None:
    if not passages == scored == in_manifest:
        raise ValueError(f"{passages} passages, {scored} scored, {in_manifest} in the manifest")
