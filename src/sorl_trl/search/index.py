"""The base of the engines of this package: an index is a folder, made by `build` and opened by `load`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from sorl_trl.files import missing
from sorl_trl.search.corpus import CorpusPaths, corpus_files, read_passages
from sorl_trl.types import Passage

MANIFEST = "manifest.json"
# Increase it with any change to the files, even by a library, or to `tokenize`: an index of other tokens would not
# fail, but find too little.
FORMAT_VERSION = 5
CORPUS = "corpus.jsonl"
"""The file of passages in the index folder of an engine that does not store them itself."""

Writer = Callable[[Iterable[Passage], Path, bool], int]
"""Writes passages into a folder, with or without a progress bar, and returns their number."""
Index = TypeVar("Index", bound="SavedIndex")


class IndexCorrupted(ValueError):
    """A saved index must not be used. The message names the file and says what to do."""

    def __init__(self, directory: Path, problem: str) -> None:
        super().__init__(f"index {directory}: {problem}; delete the directory and build the index again")


class IndexOutdated(ValueError):
    """A saved index was built from a corpus other than the given one."""


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    engine: str
    num_documents: int
    sources: list[dict[str, str | int]]
    """The fingerprints of the corpus files, in the order of reading."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Everything else that answers depend on."""
    format_version: int = FORMAT_VERSION

    @property
    def identity(self) -> str:
        """A short name of the content: the corpus, and how the engine reads it."""
        content = [self.format_version, self.engine, self.settings, self.sources]
        return f"{self.engine}-{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]}"


class SavedIndex(ABC):
    """A `SearchBackend` whose files lie in one folder. A subclass opens them in its constructor."""

    thread_safe = True
    engine: ClassVar[str]
    """The engine's name in the manifest."""
    _write: ClassVar[staticmethod[[Iterable[Passage], Path, bool], int]]
    """The `Writer` of an engine whose `build` needs only the corpus."""

    def __init__(self, directory: Path) -> None:
        self._manifest = read_manifest(directory)
        if self._manifest.engine != self.engine:
            raise ValueError(f"index {directory}: its engine is {self._manifest.engine!r}; use `open_index`")

    @property
    def identity(self) -> str:
        """A short name of its content, for caches: equal names give equal answers."""
        return self._manifest.identity

    def __len__(self) -> int:
        return self._manifest.num_documents

    @abstractmethod
    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Returns fewer than `k` passages, or none, if there are no more hits."""

    @classmethod
    def build(
        cls: type[Index], corpus_path: CorpusPaths, index_dir: str | os.PathLike[str], show_progress: bool = True
    ) -> Index:
        """Index a corpus into a new folder, and load it.

        The folder is written under another name and renamed when complete, so it never exists in part.

        Args:
            corpus_path: The corpus, as in `corpus_files`.
            index_dir: The folder to create, with its parents if missing.
            show_progress: Whether to show progress bars on stderr.

        Raises:
            CorpusError: The corpus is empty or a line is not a passage.
            FileExistsError: `index_dir` already exists.
            ImportError: The engine's library is not installed.
        """
        write_index(cls.engine, corpus_path, index_dir, cls._write, show_progress)
        return cls.load(index_dir)

    @classmethod
    def open(cls: type[Index], corpus_path: CorpusPaths, index_dir: str | os.PathLike[str]) -> Index:
        """Load the index of a corpus, and build it first if there is none. This reads the whole corpus.

        Raises:
            IndexOutdated: The corpus has changed since the index at `index_dir` was built.
            CorpusError, ImportError, IndexCorrupted, ValueError: As `build` and `load` do.
        """
        directory = Path(index_dir)
        if not directory.exists():
            return cls.build(corpus_path, index_dir)
        files = corpus_files(corpus_path)
        if read_manifest(directory).sources != [fingerprint(path) for path in files]:
            raise IndexOutdated(
                f"index {index_dir}: it was built from different content than {', '.join(map(str, files))} has now; "
                "delete the folder to build it again, or name another index"
            )
        return cls.load(index_dir)

    @classmethod
    def load(cls: type[Index], index_dir: str | os.PathLike[str]) -> Index:
        """Open an index folder, if its manifest says that this version can.

        Raises:
            FileNotFoundError: There is no such folder, or no index in it.
            ImportError: The engine's library is not installed.
            IndexCorrupted: Another version built it, or it is damaged.
            ValueError: Another engine built it.
        """
        return cls(Path(index_dir))


def write_index(
    engine: str,
    corpus_path: CorpusPaths,
    index_dir: str | os.PathLike[str],
    write: Writer,
    show_progress: bool,
    settings: Mapping[str, str] | None = None,
) -> None:
    """Write an index and its manifest into a hidden folder, and rename it when complete.

    A build that is killed leaves the hidden folder behind.
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
    except BaseException as error:  # Even Ctrl-C must not leave a gigabyte behind.
        shutil.rmtree(staging, ignore_errors=True)
        # Another process, even on another node, may have finished the same index in the meantime.
        if not (isinstance(error, OSError) and index_dir.is_dir()):
            raise


def read_manifest(directory: Path) -> Manifest:
    """Read the `manifest.json` of any engine; unknown fields are ignored. Raises what `SavedIndex.load` raises."""
    if not directory.exists():
        raise FileNotFoundError(missing("index", directory))
    if not (directory / MANIFEST).is_file():
        raise FileNotFoundError(f"index {directory}: there is no {MANIFEST}; name another, or build the index")
    try:
        record = json.loads((directory / MANIFEST).read_bytes())
        if record["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version is {record['format_version']!r}, allowed is {FORMAT_VERSION}")
        return Manifest(**{each.name: record[each.name] for each in fields(Manifest)})
    except (ValueError, TypeError, LookupError) as error:
        raise IndexCorrupted(directory, f"{MANIFEST} cannot be read ({error})") from error


def fingerprint(path: Path) -> dict[str, str | int]:
    """The `sha256` and size in `bytes` of a file, which is read once, a megabyte at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
        return {"sha256": digest.hexdigest(), "bytes": file.tell()}
