"""What saved indexes share: how they are written, and what they answer beyond a search."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar
from uuid import uuid4

from sorl_trl.search.backend import SearchBackend
from sorl_trl.search.corpus import CorpusPaths, corpus_files
from sorl_trl.search.manifest import check_sources

CORPUS = "corpus.jsonl"
"""The passages, in the index directory of an engine that does not store them itself."""
HASHED_BYTES = 1 << 20
"""Larger files of engines for large corpora are checked by size when they are loaded."""


class SavedIndex(SearchBackend, Protocol):
    """A search engine that lies in one directory."""

    engine: ClassVar[str]
    """Its name in the manifest."""

    @property
    def identity(self) -> str:
        """A short name of its content, for keys of caches: equal names give equal answers."""
        ...

    def __len__(self) -> int:
        """The number of passages."""
        ...


class CorpusIndex(SavedIndex, Protocol):
    """A `SavedIndex` that needs nothing but a corpus."""

    @classmethod
    def build(cls: type[Index], corpus_path: CorpusPaths, index_dir: str | os.PathLike[str]) -> Index: ...

    @classmethod
    def load(cls: type[Index], index_dir: str | os.PathLike[str]) -> Index: ...


Index = TypeVar("Index", bound=CorpusIndex)


def open_or_build(engine: type[Index], corpus_path: CorpusPaths, index_dir: str | os.PathLike[str]) -> Index:
    """Load the index of a corpus, built first where there is none. Reads the whole corpus.

    Raises:
        IndexOutdated: The index at `index_dir` was built from another content than the corpus has now.
    """
    if not Path(index_dir).exists():
        return engine.build(corpus_path, index_dir)
    check_sources(Path(index_dir), corpus_files(corpus_path))
    return engine.load(index_dir)


@contextmanager
def staged(index_dir: str | os.PathLike[str]) -> Iterator[Path]:
    """A directory to write an index into, renamed to `index_dir` when complete: it is there as a whole or not at all.

    Raises:
        FileExistsError: There is already something at `index_dir`.
    """
    index_dir = Path(index_dir)
    if index_dir.exists():
        raise FileExistsError(f"index_dir {index_dir} exists; load it, delete it or choose another")
    staging = index_dir.with_name(f".{index_dir.name}.{uuid4().hex}")
    staging.mkdir(parents=True)
    try:
        yield staging
        staging.rename(index_dir)
    except BaseException as error:  # Ctrl-C too must not leave a gigabyte behind.
        shutil.rmtree(staging, ignore_errors=True)
        # Another process, on another node even, may have finished the same index meanwhile.
        if not (isinstance(error, OSError) and index_dir.is_dir()):
            raise
