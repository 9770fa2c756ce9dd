"""Passages in JSONL files, and the base of the engines: an index is a folder, made by `build` and opened by `load`."""

from __future__ import annotations

import gzip
import hashlib
import json
import mmap
import os
import shutil
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from tqdm.auto import tqdm

from sorl_trl.files import missing
from sorl_trl.text import identifier, json_object
from sorl_trl.types import Passage

MANIFEST = "manifest.json"
# Increase it with any change to the files, even by a library, or to `tokenize`: an index of other tokens would not
# fail, but find too little.
FORMAT_VERSION = 6
CORPUS = "corpus.jsonl"
"""The passage file in an index folder, if the engine does not store passages itself."""
CorpusPaths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""The argument of `corpus_files`."""
ENDINGS = (".jsonl", ".jsonl.gz")


class CorpusError(ValueError):
    """A corpus file cannot be used. The message names the file and, if possible, the line."""


class Corpus:
    """The passages of a UTF-8 corpus file, indexed by line, and read from the file when needed.

    A line is `{"id", "title", "text"}`, or `{"id", "contents"}` as in Search-R1, where `contents` is the title in
    quotes, a newline, and the text; without a newline, there is no title. Other fields are ignored.

    The file is memory-mapped, and only the byte offsets of its lines are held in memory. Offsets are found on opening;
    a line is parsed when it is read. Threads may share a corpus.

    Raises:
        CorpusError: The file is empty, or a line that is read is not a passage.
        FileNotFoundError: There is no such file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._offsets = array("q", [0])
        """Where each line starts, in bytes, and where the last one ends."""
        with self._path.open("rb") as file:
            for line in file:
                self._offsets.append(self._offsets[-1] + len(line))
            if not len(self):
                raise CorpusError(f"{self._path}: the corpus is empty, but needs at least one passage")
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Passage:
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in [0, {len(self)}), got {index}")
        line = self._lines[self._offsets[index] : self._offsets[index + 1]]
        return _parse_line(self._path, index + 1, line)

    def __iter__(self) -> Iterator[Passage]:
        return (self[index] for index in range(len(self)))


def corpus_files(paths: CorpusPaths) -> list[Path]:
    """The files of a corpus, in the order in which they are read.

    Each path is a JSONL file, a gzipped one (with a name in `.gz`), or a folder, for its `.jsonl` and `.jsonl.gz`
    files, ordered by name. Raises CorpusError if a folder has none, and FileNotFoundError.
    """
    files: list[Path] = []
    for path in map(Path, [paths] if isinstance(paths, str | os.PathLike) else paths):
        files += sorted(file for file in path.iterdir() if file.name.endswith(ENDINGS)) if path.is_dir() else [path]
    if not files:
        raise CorpusError(f"corpus {paths}: it has no file that ends in {' or '.join(ENDINGS)}")
    if absent := next((file for file in files if not file.exists()), None):
        raise FileNotFoundError(missing("corpus", absent))
    return files


def read_passages(files: Sequence[Path], show_progress: bool) -> Iterator[Passage]:
    """Read the passages of the files in order, a line at a time, in the schemas of `Corpus`. Blank lines are skipped.

    Raises CorpusError if there is no passage, a line is not a passage, or a file named `.gz` is not gzip.
    """
    is_empty = True
    passages = (passage for file in files for passage in _passages(file))
    for passage in tqdm(passages, desc="Reading passages", disable=not show_progress):
        is_empty = False
        yield passage
    if is_empty:
        raise CorpusError(f"{', '.join(map(str, files))}: the corpus is empty, but needs at least one passage")


def write_corpus(passages: Iterable[Passage], path: str | os.PathLike[str]) -> None:
    """Write passages, without their scores, as `{"id", "title", "text"}` lines that `Corpus` reads back unchanged."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for passage in passages:
            record = {"id": passage.id, "title": passage.title, "text": passage.text}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def as_contents(passage: Passage) -> str:
    """A passage as one text in Search-R1's format: title in quotes, newline, text; only the text if untitled."""
    return f'"{passage.title}"\n{passage.text}' if passage.title else passage.text


def title_and_text(record: Mapping[str, object]) -> tuple[str, str]:
    """Title and text of a record in one of `Corpus`'s schemas. Raises `ValueError` for any other."""
    title, text, contents = (record.get(name) for name in ("title", "text", "contents"))
    if isinstance(title, str) and isinstance(text, str):
        return title, text
    if not isinstance(contents, str):
        raise ValueError(f"a passage needs `title` and `text`, or `contents`, as strings; got fields {sorted(record)}")
    first_line, newline, rest = contents.partition("\n")
    if not newline:
        return (title if isinstance(title, str) else ""), contents
    first_line = first_line.strip()
    is_quoted = len(first_line) > 1 and first_line[0] == first_line[-1] == '"'
    return (first_line[1:-1] if is_quoted else first_line), rest


def _passages(path: Path) -> Iterator[Passage]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse_line(path, number, line)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorpusError(f"{path}, after line {number}: not a complete gzip file ({error})") from error


def _parse_line(path: Path, number: int, line: bytes) -> Passage:
    try:
        record = json_object(line, "a passage", needs=("id",))
        passage = Passage(identifier("id", record.get("id")), *title_and_text(record))
        # Refuse half a surrogate pair, which JSON can spell but no tokenizer encode, while the line is known.
        f"{passage.id}{passage.title}{passage.text}".encode()
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path}, line {number}: {error}") from error
    return passage


Writer = Callable[[Iterable[Passage], Path, bool], int]
"""Writes passages into a folder, with or without a progress bar, and returns their number."""
Index = TypeVar("Index", bound="SavedIndex")


class IndexOutdated(ValueError):
    """An index was built from another corpus, or by another version. The message gives the remedy."""

    def __init__(self, directory: Path, problem: str) -> None:
        super().__init__(f"index {directory}: {problem}; delete the folder to rebuild it, or choose another index")


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
    """A `SearchBackend` with all its files in one folder. A subclass opens them in its constructor."""

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
        """A short name of its content, for caches. Equal names give equal answers."""
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

        The folder is written under another name and renamed when complete, so it is never partial.

        Args:
            corpus_path: JSONL files, with or without gzip, or folders of them; see `Corpus`.
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
        """Load the index of a corpus, building it first if there is none. This reads the whole corpus.

        Raises IndexOutdated if the corpus has changed since the index was built, and the errors of `build` and `load`.
        """
        directory = Path(index_dir)
        if not directory.exists():
            return cls.build(corpus_path, index_dir)
        if read_manifest(directory).sources != [fingerprint(path) for path in corpus_files(corpus_path)]:
            raise IndexOutdated(directory, f"it was built from different content than {corpus_path} has now")
        return cls.load(index_dir)

    @classmethod
    def load(cls: type[Index], index_dir: str | os.PathLike[str]) -> Index:
        """Open an index folder.

        Raises:
            FileNotFoundError: There is no such folder, or no index in it.
            ImportError: The engine's library is not installed.
            IndexOutdated: Another version built it.
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
    """Read the `manifest.json` of any engine. Raises the errors of `SavedIndex.load`."""
    if not directory.exists():
        raise FileNotFoundError(missing("index", directory))
    if not (directory / MANIFEST).is_file():
        raise FileNotFoundError(
            f"index {directory}: there is no {MANIFEST}; choose another folder, or build the index"
        )
    try:
        record = json.loads((directory / MANIFEST).read_bytes())
        version = record["format_version"]
        manifest = Manifest(**record) if version == FORMAT_VERSION else None
    except (ValueError, TypeError, LookupError) as error:
        raise IndexOutdated(directory, f"its {MANIFEST} cannot be read ({error})") from error
    if manifest is None:
        raise IndexOutdated(directory, f"it has version {version}, but must have {FORMAT_VERSION}")
    return manifest


def fingerprint(path: Path) -> dict[str, str | int]:
    """The `sha256` and size in `bytes` of a file, which is read once, a megabyte at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
        return {"sha256": digest.hexdigest(), "bytes": file.tell()}
