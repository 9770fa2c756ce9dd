"""Search engines over a corpus, by name: BM25, tantivy and dense retrieval."""

from __future__ import annotations

import os
from pathlib import Path

from sorl_trl.search.engines.bm25 import BM25Index
from sorl_trl.search.engines.dense import DenseIndex
from sorl_trl.search.engines.saved import SavedIndex, read_manifest
from sorl_trl.search.engines.tantivy import TantivyIndex

ENGINES: dict[str, type[SavedIndex]] = {index.engine: index for index in (BM25Index, TantivyIndex, DenseIndex)}


def open_index(index_dir: str | os.PathLike[str]) -> SavedIndex:
    """Load an index with the engine that built it; `SavedIndex.load` lists all that it raises.

    Raises:
        ValueError: This version does not know the engine that built it.
    """
    engine = read_manifest(Path(index_dir)).engine
    if engine not in ENGINES:
        raise ValueError(f"index {index_dir}: made by the engine {engine!r}, known are {', '.join(ENGINES)}")
    return ENGINES[engine].load(index_dir)
