"""What corpora hold, and how their files are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.search import Corpus, CorpusError, write_corpus
from sorl_trl.search.corpus import corpus_files, read_passages
from sorl_trl.types import Passage

GOOD = '{"id": "1", "contents": "T\\ntext"}'


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def read(*files: Path) -> list[Passage]:
    return list(read_passages(files, show_progress=False))


@pytest.mark.parametrize(
    ("record", "passage"),
    [
        ({"id": "7", "contents": '"Paris"\nA city.\nOn the Seine.'}, Passage("7", "Paris", "A city.\nOn the Seine.")),
        ({"id": 7, "contents": "Paris\nA city."}, Passage("7", "Paris", "A city.")),
        ({"id": "7", "contents": '""Weird Al" Yankovic"\nA man.'}, Passage("7", '"Weird Al" Yankovic', "A man.")),
        ({"id": "7", "contents": "no title"}, Passage("7", "", "no title")),
        ({"id": "7", "title": "T", "text": "t", "contents": '"U"\nu'}, Passage("7", "T", "t")),
        ({"id": "7", "title": "", "text": ""}, Passage("7", "", "")),
    ],
)
def test_both_schemas(tmp_path: Path, record: dict[str, Any], passage: Passage) -> None:
    path = write(tmp_path / "corpus.jsonl", json.dumps(record))
    assert list(Corpus(path)) == read(path) == [passage]


@pytest.mark.parametrize(
    "line",
    [
        *["{", "[1]", "[" * 100_000, '{"id": "1", "title": "T"}', '{"id": "1", "contents": 3}'],
        *['{"contents": "T\\nt"}', '{"id": true, "contents": "T\\nt"}', '{"id": "1", "contents": "\\ud800"}'],
        b'{"id": "1", "contents": "T\\n\xff"}',
    ],
    ids=range(9),
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes) -> None:
    path = write(tmp_path / "c.jsonl", GOOD, line, GOOD)
    assert Corpus(path)[2].title == "T"
    for reader in (Corpus, read):
        with pytest.raises(CorpusError, match=r"c\.jsonl, line 2: ."):
            list(reader(path))


# A surrogate cannot be encoded in UTF-8, neither to write nor to read.
texts = st.text(st.characters(exclude_categories=["Cs"]))


@settings(deadline=None)
@given(passages=st.lists(st.builds(Passage, texts, texts, texts), min_size=1))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, passages: list[Passage]) -> None:
    path = tmp_path_factory.mktemp("round-trip") / "corpus.jsonl"
    write_corpus(iter(passages), path)
    corpus = Corpus(path)
    assert list(corpus) == read(path) == passages
    assert [corpus[i] for i in reversed(range(len(corpus)))] == passages[::-1]


def test_a_corpus_is_files_that_exist_and_are_not_compressed(tmp_path: Path) -> None:
    given = [write(tmp_path / "z.jsonl", GOOD), write(tmp_path / "notes.txt", "")]
    assert corpus_files(given) == given
    for refused in (tmp_path, write(tmp_path / "a.jsonl.gz", GOOD)):
        with pytest.raises(CorpusError, match="must be a JSONL file"):
            corpus_files([given[0], refused])
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        corpus_files(tmp_path / "nowhere.jsonl")
    with pytest.raises(CorpusError, match="empty"):
        read(given[1])


def test_files_of_both_schemas_are_read_in_turn(tmp_path: Path) -> None:
    """An editor's mark at the beginning of a file is no text, and a blank line no passage."""
    wiki = write(tmp_path / "wiki.jsonl", f"\ufeff{GOOD}", " ", '{"id": "2", "contents": "\\"U\\"\\nmore"}', "")
    (tmp_path / "empty.jsonl").touch()
    other = write(tmp_path / "other.jsonl", '{"id": "3", "title": "V", "text": "c"}')
    passages = read(wiki, tmp_path / "empty.jsonl", other)
    assert passages == [Passage("1", "T", "text"), Passage("2", "U", "more"), Passage("3", "V", "c")]
