"""What every search engine of this package is: files in one directory, made by `build` and opened by `load`."""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, TypeVar
from uuid import uuid4

from sorl_trl.search.corpus import CorpusPaths, corpus_files, read_passages
from sorl_trl.search.engines.manifest import MANIFEST, IndexOutdated, Manifest, fingerprint, read_manifest
from sorl_trl.types import Passage

CORPUS = "corpus.jsonl"
"""The passages, in the index directory of an engine that does not store them itself."""

Write = Callable[[Iterable[Passage], Path, bool], int]
"""Puts passages into a directory, showing progress or not, and returns their number."""
Index = TypeVar("Index", bound="SavedIndex")


class SavedIndex(ABC):
    """A `SearchBackend` whose files lie in one directory."""

    thread_safe = True
    engine: ClassVar[str]
    """Its name in the manifest."""
    _write: ClassVar[staticmethod[[Iterable[Passage], Path, bool], int]]
    """Of an engine whose `build` needs nothing but the corpus."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    @property
    def identity(self) -> str:
        """A short name of its content, for keys of caches: equal names give equal answers."""
        return self._manifest.identity

    def __len__(self) -> int:
        return self._manifest.num_documents

    @abstractmethod
    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Gives fewer than `k` passages, or none, where there are no more hits."""

    @classmethod
    def build(
        cls: type[Index], corpus_path: CorpusPaths, index_dir: str | os.PathLike[str], show_progress: bool = True
    ) -> Index:
        """Index a corpus into a new directory, and load it.

        The directory is written under another name and renamed when complete: it is there as a whole or not at all.

        Args:
            corpus_path: The corpus, as `corpus_files` finds it.
            index_dir: The directory to make; its parents are made where missing.
            show_progress: Show progress bars on stderr.

        Raises:
            CorpusError: The corpus is empty or a line is not a passage.
            FileExistsError: There is already something at `index_dir`.
            ImportError: The engine's library is not installed.
        """
        write_index(cls.engine, corpus_path, index_dir, cls._write, show_progress)
        return cls.load(index_dir)

    @classmethod
    def open(cls: type[Index], corpus_path: CorpusPaths, index_dir: str | os.PathLike[str]) -> Index:
        """Load the index of a corpus, and build it first where there is none. This reads the whole corpus.

        Raises:
            IndexOutdated: The index at `index_dir` was built from another content than the corpus has now.
            CorpusError, ImportError, IndexCorrupted, ValueError: As `build` and `load` do.
        """
        directory = Path(index_dir)
        if not directory.exists():
            return cls.build(corpus_path, index_dir)
        files = corpus_files(corpus_path)
        if read_manifest(directory).sources != [fingerprint(path) for path in files]:
            raise IndexOutdated(
                f"index {index_dir}: it was built from another content than {', '.join(map(str, files))} has now; "
                "delete the directory to build it again, or name another index"
            )
        return cls.load(index_dir)

    @classmethod
    @abstractmethod
    def load(cls: type[Index], index_dir: str | os.PathLike[str]) -> Index:
        """Open an index directory, if its manifest says that this version can.

        Raises:
            FileNotFoundError: There is no such directory, or no index in it.
            ImportError: The engine's library is not installed.
            IndexCorrupted: It is of another version.
            ValueError: Another engine made it.
        """


def write_index(
    engine: str,
    corpus_path: CorpusPaths,
    index_dir: str | os.PathLike[str],
    write: Write,
    show_progress: bool,
    settings: Mapping[str, str] | None = None,
) -> None:
    """Write an index and its manifest into a hidden directory, and rename it when complete.

    A build that is killed leaves the hidden directory behind.
    """
    index_dir, files = Path(index_dir), corpus_files(corpus_path)
    if index_dir.exists():
        raise FileExistsError(f"index_dir {index_dir} exists; load it, delete it or choose another")
    staging = index_dir.with_name(f".{index_dir.name}.{uuid4().hex}")
    staging.mkdir(parents=True)
    try:
        sources = [fingerprint(file) for file in files]
        size = write(read_passages(files, show_progress), staging, show_progress)
        manifest = Manifest(engine, size, sources, dict(settings or {}))
        (staging / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
        staging.rename(index_dir)
    except BaseException as error:  # Ctrl-C too must not leave a gigabyte behind.
        shutil.rmtree(staging, ignore_errors=True)
        # Another process, on another node even, may have finished the same index meanwhile.
        if not (isinstance(error, OSError) and index_dir.is_dir()):
            raise
