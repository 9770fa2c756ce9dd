from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.search import Corpus, CorpusError, write_corpus
from sorl_trl.search.corpus import as_contents, corpus_files, read_passages, split_contents
from sorl_trl.types import Passage

GOOD = '{"id": "1", "contents": "T\\ntext"}'


def write(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def read(*files):
    return list(read_passages(files, show_progress=False))


@pytest.mark.parametrize(
    ("record", "passage"),
    [
        ({"id": "7", "contents": '"Paris"\nA city.\nOn the Seine.'}, Passage("7", "Paris", "A city.\nOn the Seine.")),
        ({"id": 7, "contents": "Paris\nA city."}, Passage("7", "Paris", "A city.")),
        ({"id": "7", "contents": '""Weird Al" Yankovic"\nA man.'}, Passage("7", '"Weird Al" Yankovic', "A man.")),
        ({"id": "7", "contents": '"\nA quote.'}, Passage("7", '"', "A quote.")),
        ({"id": "7", "contents": "no title"}, Passage("7", "", "no title")),
        ({"id": "7", "title": "T", "content": "c", "contents": "T c"}, Passage("7", "T", "c")),
        ({"id": "7", "title": "T", "text": "t", "contents": '"U"\nu'}, Passage("7", "T", "t")),
        ({"id": "7", "title": "", "text": ""}, Passage("7", "", "")),
        ({"id": "7", "title": None, "contents": "T\nt"}, Passage("7", "T", "t")),
        ({"id": "7", "title": "T", "contents": "one\ntwo"}, Passage("7", "T", "one\ntwo")),
        ({"id": "7", "title": "T", "contents": '"T"\nt'}, Passage("7", "T", "t")),
        ({"id": "7", "text": "T\nt"}, Passage("7", "T", "t")),
    ],
)
def test_both_schemas(tmp_path, record, passage):
    path = write(tmp_path / "corpus.jsonl", json.dumps(record))
    assert list(Corpus(path)) == read(path) == [passage]


@pytest.mark.parametrize(
    "line",
    [
        *["{", "[1]", "[" * 100_000, '{"id": "1"}', '{"id": "1", "title": "T"}', '{"id": "1", "text": 3}'],
        *['{"contents": "T\\nt"}', '{"id": true, "contents": "T\\nt"}', '{"id": "1", "contents": "\\ud800"}'],
        b'{"id": "1", "contents": "T\\n\xff"}',
    ],
    ids=range(10),
)
def test_a_bad_line_is_named(tmp_path, line):
    path = write(tmp_path / "c.jsonl", GOOD, line, GOOD)
    assert Corpus(path)[2].title == "T"
    with pytest.raises(CorpusError, match=r"c\.jsonl, line 2: ."):
        list(Corpus(path))
    compressed = write(tmp_path / "c.jsonl.gz", gzip.compress(path.read_bytes()))
    with pytest.raises(CorpusError, match=r"c\.jsonl\.gz, line 2: ."):
        read(compressed)


def test_an_empty_corpus_is_an_error(tmp_path):
    path = write(tmp_path / "corpus.jsonl", "")
    for reader in (Corpus, read):
        with pytest.raises(CorpusError, match=r"corpus\.jsonl: the corpus is empty"):
            reader(path)


# A surrogate cannot be encoded in UTF-8, neither to write nor to read.
texts = st.text(st.characters(exclude_categories=["Cs"]))


@settings(deadline=None)
@given(passages=st.lists(st.builds(Passage, texts, texts, texts), min_size=1))
def test_what_is_written_is_read_back(tmp_path_factory, passages):
    path = tmp_path_factory.mktemp("round-trip") / "corpus.jsonl"
    write_corpus(iter(passages), path)
    corpus = Corpus(path)
    assert list(corpus) == read(path) == passages
    assert [corpus[i] for i in reversed(range(len(corpus)))] == passages[::-1]


def test_threads_share_a_corpus(tmp_path):
    passages = [Passage(str(i), "T", "x" * (i % 97)) for i in range(2000)]
    write_corpus(passages, tmp_path / "corpus.jsonl")
    corpus = Corpus(tmp_path / "corpus.jsonl")
    order = [i * 7 % 2000 for i in range(2000)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(corpus.__getitem__, order)) == [passages[i] for i in order]


def names(files):
    return [file.name for file in files]


def test_files_of_a_corpus_keep_the_order_given_and_folders_theirs_by_name(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz", "notes.txt", "c.json", "z.jsonl"):
        (tmp_path / name).touch()
    assert names(corpus_files(tmp_path)) == ["a.jsonl.gz", "b.jsonl", "z.jsonl"]
    assert names(corpus_files([tmp_path / "z.jsonl", str(tmp_path / "notes.txt")])) == ["z.jsonl", "notes.txt"]


def test_no_corpus_is_an_error(tmp_path):
    for nothing in (tmp_path, []):
        with pytest.raises(CorpusError, match=r"corpus .*: it holds no file"):
            corpus_files(nothing)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        corpus_files(tmp_path / "nowhere.jsonl")


def test_plain_and_compressed_files_of_both_schemas_are_read_in_turn(tmp_path, capsys):
    """An editor's mark at the beginning of a file is no text, and a blank line no passage."""
    wiki = write(tmp_path / "wiki.jsonl", f"\ufeff{GOOD}", " ", '{"id": "2", "contents": "\\"U\\"\\nmore"}', "")
    (tmp_path / "empty.jsonl").touch()
    medical = '{"id": "3", "title": "V", "content": "c", "contents": "V c"}\n'
    (tmp_path / "medical.jsonl.gz").write_bytes(gzip.compress(medical.encode()))
    passages = list(read_passages([wiki, tmp_path / "empty.jsonl", tmp_path / "medical.jsonl.gz"], show_progress=True))
    assert passages == [Passage("1", "T", "text"), Passage("2", "U", "more"), Passage("3", "V", "c")]
    assert "Reading passages: 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage", [lambda c: c[:-9], lambda c: b"x" + c, lambda c: c[:-8] + b"\0" * 8, lambda c: c[:12] + b"\xff" * 20]
)
def test_a_damaged_compressed_file_is_named(tmp_path, damage):
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(damage(gzip.compress(f"{GOOD}\n".encode() * 100)))
    with pytest.raises(CorpusError, match=r"c\.jsonl\.gz, after line \d+"):
        read(path)


@settings(deadline=None)
@given(title=texts.filter(lambda t: t and "\n" not in t), text=texts)
def test_one_text_is_taken_apart_again(title, text):
    assert split_contents(as_contents(Passage("1", title, text))) == (title, text)
