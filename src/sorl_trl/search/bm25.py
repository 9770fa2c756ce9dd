"""The embedded search engine: BM25 over a corpus file, in one directory that every process maps into memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import bm25s
import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from sorl_trl.search.corpus import Corpus, write_corpus
from sorl_trl.search.manifest import IndexCorrupted, check_manifest, check_source, fingerprint, write_manifest
from sorl_trl.search.tokenize import tokenize
from sorl_trl.types import Passage

CORPUS = "corpus.jsonl"
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

    def __init__(self, engine: bm25s.BM25, corpus: Corpus) -> None:
        self._engine = engine
        self._corpus = corpus

    @classmethod
    def build(
        cls, corpus_path: str | os.PathLike[str], index_dir: str | os.PathLike[str], show_progress: bool = True
    ) -> BM25Index:
        """Index a corpus file into a new directory, and load it.

        The directory is written under another name and renamed when complete: it is there as a whole or not at all.

        Args:
            corpus_path: A JSONL file as `Corpus` reads it.
            index_dir: The directory to make; its parents are made where missing.
            show_progress: Show progress bars on stderr.

        Raises:
            CorpusError: The corpus is empty or a line is not a passage.
            FileExistsError: There is already something at `index_dir`.
            ValueError: No passage holds a token.
        """
        index_dir = Path(index_dir)
        if index_dir.exists():
            raise FileExistsError(f"index_dir {index_dir} exists; load it, delete it or choose another")
        staging = index_dir.with_name(f".{index_dir.name}.{uuid4().hex}")
        staging.mkdir(parents=True)
        try:
            _write_index(Path(corpus_path), staging, show_progress)
            staging.rename(index_dir)
        except BaseException as error:  # Ctrl-C too must not leave a gigabyte behind.
            shutil.rmtree(staging, ignore_errors=True)
            # Another process, on another node even, may have finished the same index meanwhile.
            if not (isinstance(error, OSError) and index_dir.is_dir()):
                raise
        return cls.load(index_dir)

    @classmethod
    def open(cls, corpus_path: str | os.PathLike[str], index_dir: str | os.PathLike[str]) -> BM25Index:
        """Load the index of a corpus, built first where there is none.

        Raises:
            IndexOutdated: The index at `index_dir` was built from another content than the corpus has now.
            CorpusError, IndexCorrupted, ValueError: As `build` and `load` do.
        """
        if not Path(index_dir).exists():
            return cls.build(corpus_path, index_dir)
        check_source(Path(index_dir), Path(corpus_path))
        return cls.load(index_dir)

    @classmethod
    def load(cls, index_dir: str | os.PathLike[str]) -> BM25Index:
        """Map an index directory into memory, after every file was checked against the manifest.

        Raises:
            FileNotFoundError: There is no such directory.
            IndexCorrupted: A file is missing, changed, of another version or inconsistent.
        """
        index_dir = Path(index_dir)
        if not index_dir.is_dir():
            raise FileNotFoundError(f"index_dir {index_dir} is not a directory; build the index first")
        manifest = check_manifest(index_dir, INDEX_FILES)
        try:
            engine = bm25s.BM25.load(index_dir, mmap=True, allow_pickle=False)
            corpus = Corpus(index_dir / CORPUS)
            _check_bounds(engine, len(corpus), manifest.num_documents)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise IndexCorrupted(index_dir, f"the files do not fit together ({error})") from error
        return cls(engine, corpus)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Gives fewer than `k` passages, or none, where there are no more hits."""
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if isinstance(queries, str):
            raise TypeError(f"queries must be a sequence of strings, got the string {queries!r}")
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> list[Passage]:
        token_ids = sorted(set(self._engine.get_tokens_ids(tokenize(query))))
        scores = self._engine.get_scores_from_ids(token_ids)
        return [replace(self._corpus[i], score=float(scores[i])) for i in top_k(scores, k)]


def top_k(scores: npt.NDArray[np.float32], k: int) -> list[int]:
    """The indices of the `k` highest positive scores, best first, equal scores in index order.

    Only positive scores are looked at: nearly all are zero, on which `np.argpartition` is at its slowest (about 35
    times the time of this, over 100,000 passages), and a zero is no hit. `scores` has shape (N,).
    """
    hits = np.flatnonzero(scores > 0)
    if len(hits) > k:
        # Whatever ties with the k-th highest stays in, so that the sort below decides between them, not chance.
        threshold = np.partition(scores[hits], -k)[-k]
        hits = hits[scores[hits] >= threshold]
    best_first = np.argsort(-scores[hits], kind="stable")
    return [int(index) for index in hits[best_first[:k]]]


def _write_index(corpus_path: Path, directory: Path, show_progress: bool) -> None:
    source = Corpus(corpus_path)
    source_fingerprint = fingerprint(corpus_path)
    passages = tqdm(source, desc="Reading passages", total=len(source), disable=not show_progress)
    write_corpus(passages, directory / CORPUS)
    corpus = Corpus(directory / CORPUS)  # What is indexed is what was written, even if the source changes meanwhile.
    token_ids, vocabulary = _encode(corpus, show_progress)
    if not vocabulary:
        raise ValueError(f"corpus_path {corpus_path}: no passage holds a letter or digit outside the stop words")
    engine = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    engine.index((token_ids, vocabulary), create_empty_token=False, show_progress=show_progress)
    engine.save(directory)
    write_manifest(directory, INDEX_FILES, len(corpus), source_fingerprint)


def _encode(corpus: Corpus, show_progress: bool) -> tuple[list[list[int]], dict[str, int]]:
    """Token ids of every passage, and the vocabulary: ids in order of appearance, hence the same in every run."""
    vocabulary: dict[str, int] = {}
    token_ids = [
        [vocabulary.setdefault(token, len(vocabulary)) for token in tokenize(f"{passage.title}\n{passage.text}")]
        for passage in tqdm(corpus, desc="Splitting into tokens", total=len(corpus), disable=not show_progress)
    ]
    return token_ids, vocabulary


def _check_bounds(engine: bm25s.BM25, corpus_size: int, num_documents: int) -> None:
    """Raise `ValueError` unless every index of the score matrix points into it: numpy takes -1 for the last."""
    data, indices, indptr = (engine.scores[name] for name in ("data", "indices", "indptr"))
    if not corpus_size == engine.scores["num_docs"] == num_documents:
        raise ValueError(
            f"{corpus_size} passages, {engine.scores['num_docs']} scored, {num_documents} in the manifest"
        )
    if not len(data) == len(indices) == indptr[-1] or indptr[0] != 0 or np.any(np.diff(indptr) < 0):
        raise ValueError("posting lists out of bounds")
    if indices.min(initial=0) < 0 or indices.max(initial=0) >= num_documents:
        raise ValueError("document index out of bounds")
    if sorted(engine.vocab_dict.values()) != list(range(len(indptr) - 1)):
        raise ValueError("vocabulary out of bounds")
