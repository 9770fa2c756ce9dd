"""Dense retrieval: an embedding model, and exact inner products with every passage."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from tqdm.auto import trange

from sorl_trl.search.backend import check_request
from sorl_trl.search.index import CORPUS, Corpus, CorpusPaths, SavedIndex, as_contents, write_corpus, write_index
from sorl_trl.text import encodable
from sorl_trl.types import Passage

VECTORS = "vectors.npy"
ENCODED_AT_ONCE = 4096
"""How many passages the model gets at once. It sorts them by length, which keeps padding low."""


@dataclass(frozen=True)
class DenseOptions:
    """An embedding model and its text prefixes. The defaults are those of Search-R1's retriever, E5.

    Args:
        model: A Hub id or a local folder of a sentence-transformers model, or of a transformers model, with states
            averaged over tokens.
        query_prefix: Text before every query.
        passage_prefix: Text before every passage, which consists of its title in quotes, a newline, and its text.
    """

    model: str = "intfloat/e5-base-v2"
    query_prefix: str = "query: "
    passage_prefix: str = "passage: "


class Encoder:
    """A loaded model. Threads that share it take turns, because two cannot use a tokenizer at once."""

    def __init__(self, options: DenseOptions) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ImportError("the engine dense needs: pip install 'sorl-trl[dense]'") from error
        try:
            self.model = SentenceTransformer(options.model)
        except (OSError, ValueError) as error:  # The libraries' own messages do not always name the model.
            raise OSError(
                f"model must be a reachable Hub id or a model's folder, got {options.model!r} ({error})"
            ) from error
        self.options, self._lock = options, Lock()

    def encode(self, texts: Sequence[str], prefix: str) -> npt.NDArray[np.float32]:
        """Vectors (N, D) of length 1, one for each of N texts. Raises ValueError if one is not finite."""
        with self._lock:
            # A prefix is passed even if it is empty, because a model may have one of its own.
            encoded: Any = self.model.encode(
                list(texts), prompt=prefix, normalize_embeddings=True, show_progress_bar=False
            )
        vectors = np.asarray(encoded, dtype=np.float32)
        if not np.isfinite(vectors).all():
            raise ValueError(f"model {self.options.model!r} gives non-finite vectors: does it overflow?")
        return vectors


class DenseIndex(SavedIndex):
    """A `SearchBackend` that searches by meaning: it finds the passages with vectors nearest to the query's.

    Vectors have length 1, so scores, which are inner products, are cosines. The search is exact. Every passage is a
    hit for every query, except that a query of only white space has no hits. With a GPU, the model runs there and the
    vectors are in its memory; otherwise, they are mapped from the file, and processes on one machine share them.

    Make it with `build` or `load`; it needs `pip install 'sorl-trl[dense]'`.
    """

    engine: ClassVar[str] = "dense"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        import torch

        self._encoder = Encoder(DenseOptions(**self._manifest.settings))
        self._corpus = Corpus(directory / CORPUS)
        # Copy on write keeps torch from warning of read-only memory. We do not write.
        vectors = np.load(directory / VECTORS, mmap_mode="c", allow_pickle=False)
        self._vectors = torch.from_numpy(vectors).to(self._encoder.model.device)

    @classmethod
    def build(
        cls,
        corpus_path: CorpusPaths,
        index_dir: str | os.PathLike[str],
        show_progress: bool = True,
        options: DenseOptions | None = None,
    ) -> DenseIndex:
        """Embed a corpus into a new folder, and load it; see `SavedIndex.build`.

        Args:
            options: The model and how to use it; `None` for the defaults.

        Raises:
            OSError: There is no such model.
        """
        options = options or DenseOptions()
        if Path(options.model).is_dir():
            options = replace(options, model=str(Path(options.model).absolute()))  # to be found again from elsewhere
        write = partial(_write, Encoder(options))
        write_index(cls.engine, corpus_path, index_dir, write, show_progress, asdict(options))
        return cls.load(index_dir)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        import torch
        from sentence_transformers.util import dot_score, semantic_search

        check_request(queries, k)
        asked = [encodable(query) for query in queries if query.strip()]
        if not asked:
            return [[] for _ in queries]
        vectors = torch.from_numpy(self._encoder.encode(asked, self._encoder.options.query_prefix))
        found = iter(semantic_search(vectors, self._vectors, top_k=k, score_function=dot_score))
        return [self._passages(next(found)) if query.strip() else [] for query in queries]

    def _passages(self, hits: list[dict[str, Any]]) -> list[Passage]:
        return [replace(self._corpus[hit["corpus_id"]], score=hit["score"]) for hit in hits]


def _write(encoder: Encoder, passages: Iterable[Passage], directory: Path, show_progress: bool) -> int:
    write_corpus(passages, directory / CORPUS)
    corpus, vectors = Corpus(directory / CORPUS), None
    for start in trange(0, len(corpus), ENCODED_AT_ONCE, desc="Embedding passages", disable=not show_progress):
        texts = [as_contents(corpus[i]) for i in range(start, min(start + ENCODED_AT_ONCE, len(corpus)))]
        block = encoder.encode(texts, encoder.options.passage_prefix)
        if vectors is None:
            shape = (len(corpus), block.shape[1])
            vectors = np.lib.format.open_memmap(directory / VECTORS, mode="w+", dtype=np.float32, shape=shape)
        vectors[start : start + len(block)] = block
    return len(corpus)
