"""What all engines have in common: how they are built, opened, asked and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.unit.search.passages import PASSAGES

from sorl_trl.search import (
    BM25Index,
    CorpusError,
    DenseOptions,
    IndexCorrupted,
    IndexOutdated,
    SavedIndex,
    TantivyIndex,
    open_index,
    write_corpus,
)
from sorl_trl.search.arguments import ENGINES
from sorl_trl.types import Passage

LEXICAL = [BM25Index, TantivyIndex]
Build = Callable[..., SavedIndex]


@pytest.fixture(scope="module", params=ENGINES)
def build(request: pytest.FixtureRequest, embedder: Path) -> Build:
    """Each engine's `build`, without progress bars."""
    options: dict[str, Any] = {"show_progress": False}
    if request.param == "dense":
        options["options"] = DenseOptions(str(embedder), device="cpu")
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


def test_what_is_built_is_opened_by_what_its_manifest_says(
    build: Build, directory: Path, corpus_path: Path, tmp_path: Path
) -> None:
    again, opened = build(corpus_path, tmp_path / "deep" / "again"), open_index(directory)
    assert type(again) is type(opened) is ENGINES[again.engine]
    assert again.identity == opened.identity
    assert opened.identity.startswith(f"{again.engine}-")
    assert len(again) == len(opened) == len(PASSAGES)
    assert again.search_batch(["capital of France"], 2) == opened.search_batch(["capital of France"], 2)
    other = build([corpus_path, corpus_path], tmp_path / "other")
    assert (len(other), other.identity != again.identity) == (2 * len(PASSAGES), True)


def test_an_index_needs_no_corpus_file_and_overwrites_nothing(build: Build, corpus_path: Path, tmp_path: Path) -> None:
    corpus = shutil.copy(corpus_path, tmp_path / "corpus.jsonl")
    build(corpus, tmp_path / "index")
    with pytest.raises(FileExistsError, match="index_dir"):
        build(corpus, tmp_path / "index")
    Path(corpus).unlink()
    assert "it" in ids(open_index(tmp_path / "index"), "Rome", 7)


def test_a_failed_build_leaves_nothing(build: Build, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "contents": "T\\nt"}\n{\n')
    with pytest.raises(CorpusError, match=r"corpus.jsonl, line 2"):
        build(tmp_path / "corpus.jsonl", tmp_path / "indexes" / "index")
    assert list((tmp_path / "indexes").iterdir()) == []


def test_two_builds_at_once_leave_one_index(
    build: Build, corpus_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process, on a shared disk, finishes while ours is still building."""
    rename = Path.rename

    def overtaken(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        build(corpus_path, target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    assert len(build(corpus_path, tmp_path / "index")) == len(PASSAGES)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


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


UNSPACED = {
    "Chinese": ("东京是日本的首都", "首都"),
    "Japanese": ("東京は日本の首都です", "首都"),
    "Thai": ("กรุงเทพเป็นเมืองหลวงของไทย", "เมืองหลวง"),
    "Lao": ("ວຽງຈັນເປັນນະຄອນຫຼວງຂອງລາວ", "ນະຄອນຫຼວງ"),
    "Khmer": ("ភ្នំពេញជារដ្ឋធានីនៃកម្ពុជា", "រដ្ឋធានី"),
    "Burmese": ("နေပြည်တော်သည်မြန်မာနိုင်ငံ၏မြို့တော်ဖြစ်သည်", "မြို့တော်"),
    "a word of one letter": ("ရန်ကုန်မြို့သည်", "မြို့"),
}


@pytest.mark.parametrize("engine", LEXICAL)
def test_a_word_is_found_in_a_sentence_without_spaces(engine: type[SavedIndex], tmp_path: Path) -> None:
    passages = [Passage("the letters of the Thai word", "", "งลวหงอมืเ")]
    passages += [Passage(language, "", text) for language, (text, _) in UNSPACED.items()]
    write_corpus(passages, tmp_path / "corpus.jsonl")
    index = engine.build(tmp_path / "corpus.jsonl", tmp_path / "index", show_progress=False)
    for language, (text, word) in UNSPACED.items():
        assert word in text
        assert language in ids(index, word, 2)
    assert ids(index, UNSPACED["Thai"][1], 1) == ["Thai"]


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


@pytest.mark.parametrize("changes", [{"format_version": 1, "unknown": 1}, {"format_version": None}])
def test_a_manifest_of_another_version_is_found(directory: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(IndexCorrupted, match="format_version is"):
        open_index(changed(directory, tmp_path / "copy", **changes))


def test_a_manifest_may_have_fields_that_are_not_known(directory: Path, tmp_path: Path) -> None:
    """Those of an earlier release, whose index needs no building again."""
    copy = changed(directory, tmp_path / "copy", library="bm25s 0.3")
    assert open_index(copy).identity == open_index(directory).identity


def test_what_is_no_index_is_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"`index` is '.*nowhere'"):
        open_index(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"manifest\.json") as refusal:
        open_index(tmp_path)
    assert "delete" not in str(refusal.value)
    other = next(engine for engine in LEXICAL if engine is not type(open_index(directory)))
    with pytest.raises(ValueError, match="its engine is"):
        other.load(directory)
    with pytest.raises(ValueError, match="engine 'faiss'"):
        open_index(changed(directory, tmp_path / "copy", engine="faiss"))
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(IndexCorrupted, match=r"manifest\.json"):
        open_index(tmp_path)
