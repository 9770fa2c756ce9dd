"""Dense retrieval: an embedding model, and the exact inner product with every passage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from tqdm.auto import tqdm

from sorl_trl.search.checks import check_request
from sorl_trl.search.corpus import Corpus, CorpusPaths, corpus_files, read_passages, write_corpus
from sorl_trl.search.engines.encoder import DenseOptions, Encoder, Vectors
from sorl_trl.search.engines.manifest import IndexCorrupted, Manifest, check_manifest, fingerprint, write_manifest
from sorl_trl.search.engines.saved import CORPUS, HASHED_BYTES, staged
from sorl_trl.types import Passage

if TYPE_CHECKING:
    import torch

VECTORS = "vectors.npy"
INDEX_FILES = (CORPUS, VECTORS)
LIBRARY = "numpy npy"
"""Vectors are plain arrays: they outlive any version of the library that computed them."""
ENCODED_AT_ONCE = 4096
"""Passages handed to the model together: it sorts them by length, so that batches hold little padding."""
SCORES_AT_ONCE = 1 << 25
"""Query-passage scores held in memory at a time: 128 MiB of float32."""
SAME_DIRECTION = 0.99
"""Least cosine (ours) between a stored vector and the same passage embedded again; other devices round otherwise."""


class DenseIndex:
    """A `SearchBackend` by meaning: it finds the passages whose vectors are nearest to the query's, by inner product.

    Vectors have length 1, so that scores are cosines. The search is exact. Every passage is a hit of every query, save
    a query of white space alone, which has none; equal scores keep the order of the corpus. On a GPU the vectors lie
    in its memory, else they are mapped from the file, and processes on one machine share them.

    Made by `build` or `load`; needs `pip install 'sorl-trl[dense]'`.
    """

    thread_safe = True

    engine: ClassVar[str] = "dense"

    def __init__(
        self, encoder: Encoder, vectors: torch.Tensor, corpus: Corpus, directory: Path, identity: str
    ) -> None:
        self._encoder = encoder
        self._vectors = vectors
        self._corpus = corpus
        self._directory = directory
        self._identity = identity

    @classmethod
    def build(
        cls,
        corpus_path: CorpusPaths,
        index_dir: str | os.PathLike[str],
        options: DenseOptions | None = None,
        show_progress: bool = True,
    ) -> DenseIndex:
        """Embed a corpus into a new directory, and load it; see `BM25Index.build`.

        Args:
            corpus_path: The corpus, as `corpus_files` finds it.
            index_dir: The directory to make; its parents are made where missing.
            options: The model and how to use it; `None` for the defaults.
            show_progress: Show progress bars on stderr.

        Raises:
            CorpusError: The corpus is empty or a line is not a passage.
            FileExistsError: There is already something at `index_dir`.
            ImportError: sentence-transformers is not installed.
            OSError: There is no such model.
        """
        options = options or DenseOptions()
        with staged(index_dir) as directory:
            files = corpus_files(corpus_path)
            sources = [fingerprint(file) for file in files]
            encoder = Encoder(options)
            write_corpus(read_passages(files, show_progress), directory / CORPUS)
            corpus = Corpus(directory / CORPUS)
            _write_vectors(corpus, encoder, directory / VECTORS, show_progress)
            manifest = Manifest(cls.engine, LIBRARY, len(corpus), sources, options.settings)
            write_manifest(directory, INDEX_FILES, manifest)
        return cls.load(index_dir, options.device)

    @classmethod
    def load(cls, index_dir: str | os.PathLike[str], device: str | None = None) -> DenseIndex:
        """Load the model that made an index directory, and map the vectors.

        Files up to 1 MiB are checked by hash, larger ones by size. The first passage is embedded again, so that a
        model that has changed since is found.

        Args:
            device: As in `DenseOptions`.

        Raises:
            FileNotFoundError: There is no such directory.
            ImportError: sentence-transformers is not installed.
            IndexCorrupted: A file is missing, changed, of another version or inconsistent, or the model has changed.
            OSError: There is no such model any more.
            ValueError: Another engine made it.
        """
        import torch

        index_dir = Path(index_dir)
        manifest = check_manifest(index_dir, cls.engine, LIBRARY, INDEX_FILES, HASHED_BYTES)
        encoder = Encoder(_options(index_dir, manifest, device))
        corpus = Corpus(index_dir / CORPUS)
        try:
            # Copy on write: torch warns of what it may not write to, and we do not write.
            array = np.load(index_dir / VECTORS, mmap_mode="c", allow_pickle=False)
            _check_vectors(array, corpus, encoder)
        except ValueError as error:
            raise IndexCorrupted(index_dir, f"the files do not fit together ({error})") from error
        return cls(encoder, torch.from_numpy(array).to(encoder.device), corpus, index_dir, manifest.identity)

    def __reduce__(self) -> tuple[Any, tuple[Path, str]]:
        """A copy opens the files itself."""
        return DenseIndex.load, (self._directory.absolute(), self._encoder.device)

    @property
    def identity(self) -> str:
        """See `SavedIndex.identity`."""
        return self._identity

    def __len__(self) -> int:
        return len(self._corpus)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Gives fewer than `k` passages only where there are no more."""
        import torch

        check_request(queries, k)
        asked = [number for number, query in enumerate(queries) if query.strip()]
        found: list[list[Passage]] = [[] for _ in queries]
        if asked:
            vectors = torch.from_numpy(self._encoder.queries([queries[number] for number in asked]))
            for number, hits in zip(asked, nearest(self._vectors, vectors.to(self._vectors.device), k), strict=True):
                found[number] = [replace(self._corpus[row], score=score) for row, score in hits]
        return found


def nearest(vectors: torch.Tensor, queries: torch.Tensor, k: int) -> list[list[tuple[int, float]]]:
    """The rows of `vectors` with the largest inner products, best first, equal ones in the order of the rows.

    Exact, a block of rows at a time, in plain torch.

    Args:
        vectors: (N, D), float32.
        queries: (Q, D), float32, on the same device.
        k: At most so many per query.

    Returns:
        For each query, pairs of a row and its inner product.
    """
    import torch

    size = max(1, SCORES_AT_ONCE // len(queries))
    candidates = [_candidates(queries @ vectors[i : i + size].T, k, i) for i in range(0, len(vectors), size)]
    owners, rows, scores = (torch.cat(parts).cpu().numpy() for parts in zip(*candidates, strict=True))
    order = np.lexsort((rows, -scores, owners))
    starts = np.searchsorted(owners[order], np.arange(len(queries)))
    ends = np.append(starts[1:], len(order))
    best = [order[start:end][:k] for start, end in zip(starts, ends, strict=True)]
    return [[(int(rows[i]), float(scores[i])) for i in hits] for hits in best]


def _candidates(scores: torch.Tensor, k: int, first_row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, row and score of the `k` best of each query, with all that tie with the k-th, from `scores` (Q, R)."""
    # `topk` alone would choose between equal scores by chance.
    threshold = scores.topk(min(k, scores.shape[1]), dim=1).values[:, -1:]
    owners, columns = (scores >= threshold).nonzero(as_tuple=True)
    return owners, columns + first_row, scores[owners, columns]


def _options(directory: Path, manifest: Manifest, device: str | None) -> DenseOptions:
    settings = manifest.settings
    if settings.keys() != DenseOptions().settings.keys():
        raise IndexCorrupted(directory, f"settings {settings} are not those of a model")
    return DenseOptions(settings["model"], settings["query_prefix"], settings["passage_prefix"], device=device)


def _write_vectors(corpus: Corpus, encoder: Encoder, path: Path, show_progress: bool) -> None:
    vectors: Vectors | None = None
    with tqdm(total=len(corpus), desc="Embedding passages", disable=not show_progress) as bar:
        for start in range(0, len(corpus), ENCODED_AT_ONCE):
            end = min(start + ENCODED_AT_ONCE, len(corpus))
            block = encoder.passages([corpus[i] for i in range(start, end)])
            if vectors is None:
                shape = (len(corpus), block.shape[1])
                vectors = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
            vectors[start:end] = block
            bar.update(end - start)


def _check_vectors(vectors: Vectors, corpus: Corpus, encoder: Encoder) -> None:
    """Raise `ValueError` unless there is a vector for every passage, and the model is that which made them."""
    [first] = encoder.passages([corpus[0]])
    shape = (len(corpus), len(first))
    if vectors.shape != shape or vectors.dtype != np.float32:
        raise ValueError(f"vectors of {vectors.dtype} {vectors.shape}, expected float32 {shape}")
    if not (cosine := float(first @ vectors[0])) >= SAME_DIRECTION:  # NaN is neither
        raise ValueError(
            f"the model {encoder.options.model} is not the one that made the vectors: the cosine between the first "
            f"passage's stored and new vector is {cosine:.3f}, allowed from {SAME_DIRECTION}"
        )
