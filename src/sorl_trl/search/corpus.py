"""Passages in a JSONL file, one JSON object a line, read where they lie."""

from __future__ import annotations

import json
import os
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from sorl_trl.types import Passage


class CorpusError(ValueError):
    """A corpus file that cannot be used. The message names the file and, where it has one, the line."""


class Corpus:
    """Random access to the passages of a corpus file, in the order of its lines.

    Two schemas are read, and may be mixed:

    - `{"id", "title", "content" or "text"}`, as MedRAG writes it. Its `contents` is ignored, as any further field: it
      joins title and text without a newline.
    - `{"id", "contents"}`, as Search-R1 writes it: `contents` is `"Title"`, a newline, and the text. One pair of
      quotes around the title is dropped. Without a newline there is no title.

    Only the byte offsets of the lines are held in memory. Opening finds them; a line is parsed when it is asked for.
    Threads may share a corpus: it is read with `os.pread`, which moves no file position.

    Args:
        path: The file, UTF-8.

    Raises:
        CorpusError: The file is empty; later, the line asked for is not a passage.
        FileNotFoundError: There is no such file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._offsets = _line_offsets(self._path)
        if not len(self):
            raise CorpusError(f"{self._path}: the corpus is empty; it needs at least one line with a passage")
        self._descriptor = os.open(self._path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __reduce__(self) -> tuple[type[Corpus], tuple[Path]]:
        """A copy opens the file itself: a descriptor's number means another file elsewhere, or none."""
        return Corpus, (self._path,)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Passage:
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in [0, {len(self)}), got {index}")
        start, end = self._offsets[index], self._offsets[index + 1]
        try:
            return _parse(os.pread(self._descriptor, end - start, start))
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{self._path}, line {index + 1}: {error}") from error

    def __iter__(self) -> Iterator[Passage]:
        return (self[index] for index in range(len(self)))


def write_corpus(passages: Iterable[Passage], path: str | os.PathLike[str]) -> None:
    """Write passages, without their scores, as `{"id", "title", "text"}` lines that `Corpus` reads back unchanged."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for passage in passages:
            record = {"id": passage.id, "title": passage.title, "text": passage.text}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _line_offsets(path: Path) -> array[int]:
    """Where each line starts, in bytes, and where the last one ends."""
    offsets = array("q", [0])
    with path.open("rb") as file:
        for line in file:
            offsets.append(offsets[-1] + len(line))
    return offsets


def _parse(line: bytes) -> Passage:
    try:
        record = json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a passage must be a JSON object, got {type(record).__name__}")
    title, text = _title_and_text(record)
    passage = Passage(id=_identifier(record), title=title, text=text)
    # JSON can spell half a surrogate pair, which no tokenizer can encode: refused here, where its line is known.
    f"{passage.id}{title}{text}".encode()
    return passage


def _identifier(record: Mapping[str, object]) -> str:
    value = record.get("id")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"`id` must be a string or an integer, got {value!r}")
    return str(value)


def _title_and_text(record: Mapping[str, object]) -> tuple[str, str]:
    title = record.get("title")
    for name in ("content", "text"):
        text = record.get(name)
        if isinstance(title, str) and isinstance(text, str):
            return title, text
    contents = record.get("contents")
    if not isinstance(contents, str):
        raise ValueError(
            f"a passage needs `title` with `content` or `text`, or `contents`, as strings; got fields {sorted(record)}"
        )
    first_line, newline, rest = contents.partition("\n")
    return (_unquoted(first_line.strip()), rest) if newline else ("", contents)


def _unquoted(title: str) -> str:
    quoted = len(title) >= 2 and title[0] == title[-1] == '"'
    return title[1:-1] if quoted else title
