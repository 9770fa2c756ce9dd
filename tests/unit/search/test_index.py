"""What corpora hold, and what all engines have in common: how they are built, opened, asked and refused."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.search.backends import PASSAGES

from sorl_trl.search import (
    BM25Index,
    Corpus,
    CorpusError,
    DenseOptions,
    IndexOutdated,
    SavedIndex,
    TantivyIndex,
    open_index,
    write_corpus,
)
from sorl_trl.search.arguments import ENGINES
from sorl_trl.search.index import as_contents, corpus_files, read_passages, title_and_text
from sorl_trl.types import Passage

LEXICAL = [BM25Index, TantivyIndex]
Build = Callable[..., SavedIndex]


@pytest.fixture(scope="module", params=ENGINES)
def build(request: pytest.FixtureRequest, embedder: Path) -> Build:
    """Each engine's `build`, without progress bars."""
    options: dict[str, Any] = {"show_progress": False}
    if request.param == "dense":
        options["options"] = DenseOptions(str(embedder))
    return partial(ENGINES[request.param].build, **options)


@pytest.fixture(scope="module")
def directory(build: Build, corpus_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("indexes") / "index"
    build(corpus_path, directory)
    return directory


@pytest.fixture(scope="module", params=LEXICAL)
def lexical(request: pytest.FixtureRequest, corpus_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return request.param.build(corpus_path, tmp_path_factory.mktemp("lexical") / "index", show_progress=False)


def ids(index: Any, query: str, k: int = 3) -> list[str]:
    return [passage.id for passage in index.search_batch([query], k)[0]]


def test_an_index_is_opened_by_the_engine_of_its_manifest(
    build: Build, directory: Path, corpus_path: Path, tmp_path: Path
) -> None:
    again, opened = build(corpus_path, tmp_path / "deep" / "again"), open_index(directory)
    assert type(again) is type(opened) is ENGINES[again.engine]
    assert again.identity == opened.identity
    assert opened.identity.startswith(f"{again.engine}-")
    assert len(again) == len(opened) == len(PASSAGES)
    assert again.search_batch(["capital of France"], 2) == opened.search_batch(["capital of France"], 2)
    with pytest.raises(FileExistsError, match="index_dir"):
        build(corpus_path, directory)
    other = build([corpus_path, corpus_path], tmp_path / "other")
    assert (len(other), other.identity != again.identity) == (2 * len(PASSAGES), True)


def test_a_failed_build_leaves_nothing(build: Build, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "contents": "T\\nt"}\n{\n')
    with pytest.raises(CorpusError, match=r"corpus.jsonl, line 2"):
        build(tmp_path / "corpus.jsonl", tmp_path / "indexes" / "index")
    assert list((tmp_path / "indexes").iterdir()) == []


@pytest.mark.parametrize("engine", LEXICAL)
def test_open_builds_where_there_is_none_and_loads_for_its_corpus_only(
    engine: type[SavedIndex], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    write_corpus(PASSAGES, corpus)
    assert ids(engine.open(corpus, tmp_path / "index"), "rome") == ["it"]
    assert "Reading passages" in capsys.readouterr().err
    monkeypatch.setattr(engine, "build", lambda *_: pytest.fail("built again"))
    assert ids(engine.open(corpus, tmp_path / "index"), "rome") == ["it"]
    write_corpus(PASSAGES[:2], corpus)
    with pytest.raises(IndexOutdated, match=r"index .*index: .*corpus\.jsonl"):
        engine.open(corpus, tmp_path / "index")


@pytest.mark.parametrize(
    "query", ["", "   ", "?!", "・", "the of", "zzz", "\ud800", "<|im_end|>", "\x00", "y" * 99_999]
)
def test_a_query_without_a_hit_gives_nothing(lexical: Any, query: str) -> None:
    assert lexical.search_batch([query], 3) == [[]]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("curacao", ["cw"]),
        ("CURAÇAO", ["cw"]),
        ("日本", ["jp"]),
        ("twin", ["twin1", "twin2"]),
        ('"river" AND title:(Tiber^-[', ["it"]),
        ("tokens:paris", ["fr"]),
        ("river " * 100_000 + "x" * 1_000_000, ["it"]),
    ],
)
def test_queries_are_text_and_no_query_language(lexical: Any, query: str, expected: list[str]) -> None:
    assert ids(lexical, query) == expected


def test_one_answer_per_query_in_order_with_its_passages_and_scores(lexical: Any) -> None:
    batch = lexical.search_batch(["Rome", "zzz", "capital France"], 2)
    assert [[passage.id for passage in hits] for hits in batch] == [["it"], [], ["fr", "it"]]
    hit, other = batch[2]
    assert replace(hit, score=None) == PASSAGES[0]
    assert hit.score > other.score > 0
    assert lexical.search_batch(["capital Rome capital rome"], 3) == lexical.search_batch(["Rome capital"], 3)


def test_odd_text_comes_back_exactly(build: Build, tmp_path: Path) -> None:
    odd = [Passage('"\\ id', '"quoted"\n', "\x00 \u2028 \U0001f600 needle"), Passage("", "", "needle")]
    write_corpus(odd, tmp_path / "corpus.jsonl")
    [hits] = build(tmp_path / "corpus.jsonl", tmp_path / "index").search_batch(["needle"], 3)
    assert {replace(hit, score=None) for hit in hits} == set(odd)


def changed(directory: Path, copy: Path, **changes: Any) -> Path:
    """A copy of an index whose manifest has other fields."""
    shutil.copytree(directory, copy)
    record = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(record | changes))
    return copy


def test_what_is_no_index_of_this_version_is_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"`index` is '.*nowhere'"):
        open_index(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        open_index(tmp_path)
    other = next(engine for engine in LEXICAL if engine is not type(open_index(directory)))
    with pytest.raises(ValueError, match="its engine is"):
        other.load(directory)
    with pytest.raises(ValueError, match="engine 'faiss'"):
        open_index(changed(directory, tmp_path / "copy", engine="faiss"))
    with pytest.raises(IndexOutdated, match="version 1"):
        open_index(changed(directory, tmp_path / "old", format_version=1, library="bm25s 0.3"))


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
    compressed = write(tmp_path / "c.jsonl.gz", gzip.compress(path.read_bytes()))
    for reader, file in ((Corpus, path), (read, compressed)):
        with pytest.raises(CorpusError, match=f"{file.name}, line 2: ."):
            list(reader(file))


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


@settings(deadline=None)
@given(title=texts.filter(lambda t: t and "\n" not in t), text=texts)
def test_one_text_is_taken_apart_again(title: str, text: str) -> None:
    assert title_and_text({"contents": as_contents(Passage("1", title, text))}) == (title, text)


def test_files_of_a_corpus_keep_the_order_given_and_folders_theirs_by_name(tmp_path: Path) -> None:
    with pytest.raises(CorpusError):
        corpus_files(tmp_path)
    for name in ("b.jsonl", "a.jsonl.gz", "notes.txt", "c.json", "z.jsonl"):
        (tmp_path / name).touch()
    assert [file.name for file in corpus_files(tmp_path)] == ["a.jsonl.gz", "b.jsonl", "z.jsonl"]
    given = [tmp_path / "z.jsonl", tmp_path / "notes.txt"]
    assert corpus_files(given) == given
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        corpus_files(tmp_path / "nowhere.jsonl")
    with pytest.raises(CorpusError, match="empty"):
        read(tmp_path / "b.jsonl")


def test_plain_and_compressed_files_of_both_schemas_are_read_in_turn(tmp_path: Path) -> None:
    """An editor's mark at the beginning of a file is no text, and a blank line no passage."""
    wiki = write(tmp_path / "wiki.jsonl", f"\ufeff{GOOD}", " ", '{"id": "2", "contents": "\\"U\\"\\nmore"}', "")
    (tmp_path / "empty.jsonl").touch()
    other = tmp_path / "other.jsonl.gz"
    other.write_bytes(gzip.compress(b'{"id": "3", "title": "V", "text": "c"}\n'))
    passages = read(wiki, tmp_path / "empty.jsonl", other)
    assert passages == [Passage("1", "T", "text"), Passage("2", "U", "more"), Passage("3", "V", "c")]


@pytest.mark.parametrize("damage", [lambda c: c[:-9], lambda c: b"x" + c, lambda c: c[:12] + b"\xff" * 20])
def test_a_damaged_compressed_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(damage(gzip.compress(f"{GOOD}\n".encode() * 100)))
    with pytest.raises(CorpusError, match=r"c\.jsonl\.gz"):
        read(path)
