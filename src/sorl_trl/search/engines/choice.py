"""The engines by name: build any index, and open any index by what its manifest says."""

from __future__ import annotations

import os
from pathlib import Path

from sorl_trl.checks import check_choice
from sorl_trl.search.corpus import CorpusPaths
from sorl_trl.search.engines.bm25 import BM25Index
from sorl_trl.search.engines.dense import DenseIndex
from sorl_trl.search.engines.encoder import DenseOptions
from sorl_trl.search.engines.manifest import read_manifest
from sorl_trl.search.engines.saved import SavedIndex
from sorl_trl.search.engines.tantivy import TantivyIndex

ENGINES: dict[str, type[BM25Index] | type[TantivyIndex] | type[DenseIndex]] = {
    index.engine: index for index in (BM25Index, TantivyIndex, DenseIndex)
}


def build_index(
    engine: str,
    corpus_path: CorpusPaths,
    index_dir: str | os.PathLike[str],
    dense: DenseOptions | None = None,
    show_progress: bool = True,
) -> SavedIndex:
    """Build the index of a corpus with the named engine; see the `build` of its class for all that it raises.

    Args:
        engine: `bm25` up to about a million passages, `tantivy` beyond, `dense` to search by meaning.
        corpus_path: The corpus, as `corpus_files` finds it.
        index_dir: The directory to make.
        dense: Options of the engine `dense`; not for the others.
        show_progress: Show progress bars on stderr.

    Raises:
        ValueError: There is no such engine, or `dense` is given to another one.
    """
    check_choice("engine", engine, ENGINES)
    if engine == DenseIndex.engine:
        return DenseIndex.build(corpus_path, index_dir, dense, show_progress)
    if dense is not None:
        raise ValueError(f"dense must be None for the engine {engine!r}, got {dense}")
    return ENGINES[engine].build(corpus_path, index_dir, show_progress=show_progress)


def open_index(index_dir: str | os.PathLike[str]) -> SavedIndex:
    """Load an index with the engine that made it; see the `load` of its class for all that it raises.

    Raises:
        FileNotFoundError: There is no such directory.
        IndexCorrupted: The directory holds no index, or one that must not be used.
        ValueError: An engine made it that this version does not know.
    """
    engine = read_manifest(Path(index_dir)).engine
    if engine not in ENGINES:
        raise ValueError(f"index {index_dir}: made by the engine {engine!r}, known are {', '.join(ENGINES)}")
    return ENGINES[engine].load(index_dir)
