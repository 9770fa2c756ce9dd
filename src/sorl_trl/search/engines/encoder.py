"""Texts to vectors of length 1, by an embedding model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from sorl_trl.checks import POSITIVE_COUNT, Checked
from sorl_trl.search.corpus import as_contents
from sorl_trl.text import encodable
from sorl_trl.types import Passage

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class DenseOptions(Checked):
    """An embedding model, and how it is given texts. The defaults are those of Search-R1's retriever, E5.

    Args:
        model: A sentence-transformers or transformers model: a Hub id or a local folder.
        query_prefix: Put before every query.
        passage_prefix: Put before every passage, which is its title in quotes, a newline, and its text.
        batch_size: Texts per forward pass.
        device: Where the model runs, as torch names it; `None` for a GPU where there is one.
    """

    model: str = "intfloat/e5-base-v2"
    query_prefix: str = "query: "
    passage_prefix: str = "passage: "
    batch_size: Annotated[int, POSITIVE_COUNT] = 64
    device: str | None = None

    @property
    def settings(self) -> dict[str, str]:
        """The settings to search an index with again: a folder by its whole path, for the next working directory."""
        model = str(Path(self.model).absolute()) if Path(self.model).is_dir() else self.model
        return {"model": model, "query_prefix": self.query_prefix, "passage_prefix": self.passage_prefix}


class Encoder:
    """A loaded model. Threads may share it: they take turns, for tokenizers cannot be used by two at once.

    Raises:
        ImportError: sentence-transformers is not installed.
        OSError: There is no such model.
    """

    def __init__(self, options: DenseOptions) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ImportError("the engine dense needs: pip install 'sorl-trl[dense]'") from error
        self.options = options
        try:
            self._model = SentenceTransformer(options.model, device=options.device)
        except (OSError, ValueError) as error:  # The library's own words do not always name the model.
            raise OSError(
                f"model must be a Hub id within reach or the folder of a model, got {options.model!r} ({error})"
            ) from error
        self._lock = Lock()

    @property
    def device(self) -> str:
        """Where the model runs."""
        return str(self._model.device)

    def passages(self, passages: Sequence[Passage]) -> Vectors:
        """Vectors (N, D) of N passages."""
        return self._encode([as_contents(passage) for passage in passages], self.options.passage_prefix)

    def queries(self, queries: Sequence[str]) -> Vectors:
        """Vectors (N, D) of N queries, which may be any text."""
        return self._encode([encodable(query) for query in queries], self.options.query_prefix)

    def _encode(self, texts: list[str], prefix: str) -> Vectors:
        with self._lock:
            encoded: Any = self._model.encode(
                texts,
                # Given even if empty: a model may come with a prefix of its own.
                prompt=prefix,
                batch_size=self.options.batch_size,
                normalize_embeddings=True,
                show_progress_bar=False,
            )
        vectors = np.asarray(encoded, dtype=np.float32)
        if not np.isfinite(vectors).all():
            raise ValueError(f"model {self.options.model!r} gives vectors that are not finite: does it overflow?")
        return vectors
