"""Passages in JSONL files."""

from __future__ import annotations

import json
import mmap
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tqdm.auto import tqdm

from sorl_trl.files import missing
from sorl_trl.text import identifier, json_object
from sorl_trl.types import Passage

CorpusPaths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""The argument of `corpus_files`."""


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
    """The JSONL files of a corpus, in the order given. Raises FileNotFoundError, and CorpusError for anything else."""
    files = [Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    for file in files:
        if not file.exists():
            raise FileNotFoundError(missing("corpus", file))
        if file.is_dir() or file.suffix == ".gz":
            raise CorpusError(f"corpus {file} must be a JSONL file: unpack a .gz file, and name the files of a folder")
    return files


def read_passages(files: Sequence[Path], show_progress: bool) -> Iterator[Passage]:
    """Read the passages of the files in order, a line at a time, in the schemas of `Corpus`. Blank lines are skipped.

    Raises CorpusError if there is no passage, or a line is not one.
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
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse_line(path, number, line)


def _parse_line(path: Path, number: int, line: bytes) -> Passage:
    try:
        record = json_object(line, "a passage", needs=("id",))
        passage = Passage(identifier("id", record.get("id")), *title_and_text(record))
        # Refuse half a surrogate pair, which JSON can spell but no tokenizer encode, while the line is known.
        f"{passage.id}{passage.title}{passage.text}".encode()
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path}, line {number}: {error}") from error
    return passage
