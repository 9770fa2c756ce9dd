"""The arguments that name a search engine, and the command `sorl index`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.search.servers import Server

from sorl_trl.cli.main import main
from sorl_trl.search import BM25Index, IndexOutdated, SearchArguments, write_corpus
from sorl_trl.types import Passage

PARIS = Passage("7", "Paris", "capital of France")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    write_corpus([PARIS, Passage("8", "Rome", "capital of Italy")], path)
    return path


def index_command(*arguments: object) -> int:
    return main(["index", *map(str, arguments)])


def test_the_command_line_reports_what_it_made(corpus, tmp_path, capsys):
    output = tmp_path / "deep/index"
    assert index_command("--corpus", corpus, corpus, "--output", output) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("4 passages, ")
    assert BM25Index.load(output).identity in shown.out
    assert "Reading passages" in shown.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--corpus", "nowhere.jsonl"], "`corpus` is 'nowhere.jsonl'"),
        (["--corpus", "broken.jsonl"], "broken.jsonl, line 2"),
        (["--corpus", "silent.jsonl"], "corpus"),
        (["--corpus", "silent.jsonl", "--output", "folder"], "`--output` is 'folder'"),
        (["--corpus", "silent.jsonl", "--engine", "dense"], "--search_url"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, monkeypatch, capfd, arguments, named):
    monkeypatch.chdir(tmp_path)
    Path("broken.jsonl").write_text('{"id": 1, "contents": "T\\nt"}\n{\n')
    Path("silent.jsonl").write_text('{"id": 1, "contents": "?\\n!"}\n')
    Path("folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert index_command("--output", "index", *arguments) == 2
    shown = capfd.readouterr()
    [line] = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert named in line
    assert "Traceback" not in shown.err
    assert sorted(tmp_path.rglob("*")) == before


def found(arguments: SearchArguments) -> list[str]:
    (passages,) = arguments.build_search().backend.search_batch(["france"], 1)
    return [passage.id for passage in passages]


def test_a_corpus_is_indexed_beside_it_and_the_index_can_be_named_then(corpus: Path) -> None:
    by_corpus, by_index = SearchArguments(corpus=str(corpus)), SearchArguments(index=f"{corpus}.index")
    assert found(by_corpus) == found(by_corpus) == found(by_index) == ["7"]
    assert by_corpus.build_search().identity == by_index.build_search().identity
    write_corpus([PARIS], corpus)
    with pytest.raises(IndexOutdated):
        by_corpus.build_search()


def test_a_server_is_named_by_its_url() -> None:
    with closing(Server()) as server:
        arguments = SearchArguments(search_url=server.url)
        assert arguments.build_search().identity == server.url
        private = SearchArguments(search_url=server.url.replace("://", "://me:s3cret@"))
        assert private.build_search().identity == server.url


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="search_url, no_search"):
        SearchArguments(no_search=True, search_url="http://127.0.0.1")
    with pytest.raises(ValueError, match="none"):
        SearchArguments().build_search()


def test_a_function_that_makes_no_engine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`search_backend` is 'os\.getcwd', but the str has no method"):
        SearchArguments(search_backend="os.getcwd").build_search()
