"""What saved indexes share: how they are written, and what they answer beyond a search."""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar
from uuid import uuid4

from sorl_trl.search.backend import SearchBackend
from sorl_trl.search.corpus import CorpusPaths, corpus_files
from sorl_trl.search.engines.manifest import check_sources

logger = logging.getLogger(__name__)

CORPUS = "corpus.jsonl"
"""The passages, in the index directory of an engine that does not store them itself."""
HASHED_BYTES = 1 << 20
"""Larger files of engines for large corpora are checked by size when they are loaded."""
YOUNG_S = 60.0
"""A staging directory younger than this may not be locked yet."""


class SavedIndex(SearchBackend, Protocol):
    """A search engine whose files lie in one directory."""

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

    It is locked meanwhile. What a build of the same index that was killed has left, which nobody locks any more, is
    deleted first, with a warning.

    Raises:
        FileExistsError: There is already something at `index_dir`.
    """
    index_dir = Path(index_dir)
    if index_dir.exists():
        raise FileExistsError(f"index_dir {index_dir} exists; load it, delete it or choose another")
    _sweep(index_dir)
    staging = index_dir.with_name(_staging(index_dir, uuid4().hex))
    staging.mkdir(parents=True)
    lock = _lock(staging)
    try:
        yield staging
        staging.rename(index_dir)
    except BaseException as error:  # Ctrl-C too must not leave a gigabyte behind.
        shutil.rmtree(staging, ignore_errors=True)
        # Another process, on another node even, may have finished the same index meanwhile.
        if not (isinstance(error, OSError) and index_dir.is_dir()):
            raise
    finally:
        if lock is not None:
            os.close(lock)


def _staging(index_dir: Path, name: str) -> str:
    """The name of a staging directory: of this host, for locks of other hosts are not always seen."""
    return f".{index_dir.name}.{platform.node()}.{name}"


def _sweep(index_dir: Path) -> None:
    for left in index_dir.parent.glob(glob.escape(_staging(index_dir, "")) + "[0-9a-f]" * 32):
        if _age_s(left) > YOUNG_S and (lock := _lock(left)) is not None:
            logger.warning("%s: left by a build that was killed, deleted", left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:  # It was renamed or deleted just now.
        return 0.0


def _lock(directory: Path) -> int | None:
    """An open descriptor that holds the lock of a directory until it is closed, or its process ends.

    `None` if another process holds it, or the file system knows no locks of directories: nothing is swept there.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
