from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unit.search.servers import Reply, Server, result
from trl import TrlParser

from sorl_trl.search import BM25Index, IndexOutdated, write_corpus
from sorl_trl.search.arguments import SearchArguments, override_source
from sorl_trl.search.around.cache import CachedSearch
from sorl_trl.search.around.replay import RecordingSearch
from sorl_trl.search.no_search import NoSearch
from sorl_trl.types import Passage

PARIS = Passage("7", "Paris", "capital of France")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    write_corpus([PARIS, Passage("8", "Rome", "capital of Italy")], path)
    return path


def found(arguments: SearchArguments, query: str = "france") -> list[str]:
    (passages,) = arguments.build_search().backend.search_batch([query], 1)
    return [passage.id for passage in passages]


def test_a_corpus_is_indexed_beside_it_and_the_index_can_be_named_then(corpus: Path) -> None:
    assert found(SearchArguments(corpus=str(corpus))) == ["7"]
    index = f"{corpus}.index"
    assert found(SearchArguments(index=index)) == ["7"]
    identities = {SearchArguments(corpus=str(corpus)).build_search().identity, BM25Index.load(index).identity}
    assert identities == {SearchArguments(index=index).build_search().identity}
    write_corpus([PARIS], corpus)
    with pytest.raises(IndexOutdated):
        SearchArguments(corpus=str(corpus)).build_search()


def test_no_search_finds_nothing() -> None:
    assert found(SearchArguments(no_search=True)) == []
    assert isinstance(SearchArguments(no_search=True).build_search().backend, NoSearch)


def test_what_was_recorded_is_replayed(corpus: Path, tmp_path: Path) -> None:
    record = str(tmp_path / "searches.jsonl")
    for rank in (0, 1):
        built = SearchArguments(corpus=str(corpus), record=record).build_search(rank)
        assert built.backend.search_batch([["france", "italy"][rank]], 1)[0]
    second = Path(f"{record}.1")
    assert second.read_text().count("\n") == 1
    Path(record).write_text(Path(record).read_text() + second.read_text())
    assert found(SearchArguments(replay=record), "italy") == ["8"]
    assert SearchArguments(replay=record).build_search().identity.startswith("replay-")


def test_a_cache_goes_inside_of_the_recording(corpus: Path, tmp_path: Path) -> None:
    arguments = SearchArguments(corpus=str(corpus), search_cache=str(tmp_path / "c.db"), record=str(tmp_path / "r"))
    backend: Any = arguments.build_search().backend
    assert isinstance(backend, RecordingSearch)
    assert isinstance(backend._backend, CachedSearch)
    for _ in range(2):
        backend.search_batch(["france"], 1)
    assert (backend.recorded, backend._backend.hits, backend._backend.misses) == (2, 1, 1)


def test_a_corpus_is_indexed_with_the_engine_that_is_named(corpus: Path) -> None:
    """Each engine has an index of its own beside the corpus."""
    for engine, ending in (("bm25", "index"), ("tantivy", "tantivy")):
        for _ in range(2):
            arguments = SearchArguments(corpus=str(corpus), search_engine=engine)
            assert found(arguments) == ["7"]
            assert arguments.build_search().identity.startswith(f"{engine}-")
        assert found(SearchArguments(index=f"{corpus}.{ending}")) == ["7"]


def test_a_server_is_named_by_its_index_or_else_by_its_url_and_format() -> None:
    with closing(Server()) as server:
        arguments = SearchArguments(search_url=server.url, search_request="rllm")
        assert arguments.build_search().identity == f"rllm {server.url}"
        private = SearchArguments(search_url=server.url.replace("://", "://me:s3cret@"), search_request="rllm")
        assert private.build_search().identity == f"rllm {server.url}"
        server.pages["/health"] = Reply(b'{"status": "ok", "identity": "bm25-0123"}')
        assert arguments.build_search().identity == "bm25-0123"


@pytest.mark.parametrize(
    ("search_request", "keys"),
    [("search_r1", {"queries", "topk"}), ("skyrl", {"query", "topk"}), ("rllm", {"query", "k"})],
)
def test_a_server_is_asked_in_the_format_that_is_named(search_request: str, keys: set[str]) -> None:
    def reply(request: dict[str, Any]) -> Reply:
        return result([[{"document": "Paris\ncapital of France", "score": 0.5}]])

    with closing(Server()) as server:
        server.reply = reply
        backend = SearchArguments(search_url=server.url, search_request=search_request).build_search().backend
        assert [passage.title for passage in backend.search_batch(["france"], 1)[0]] == ["Paris"]
        (request,) = server.requests
    assert request.keys() - {"return_scores"} == keys
    assert "france" in str(request)


@pytest.mark.parametrize(
    ("words", "unset"),
    [
        (
            ["--search_url", "http://a"],
            ["--index=", "--corpus=", "--no_search=false", "--replay=", "--search_engine=bm25"],
        ),
        (
            ["--search-url=http://a", "--search-engine", "tantivy"],
            ["--index=", "--corpus=", "--no_search=false", "--replay="],
        ),
        (
            ["--no_search"],
            [
                *("--index=", "--corpus=", "--search_url=", "--replay="),
                *("--search_engine=bm25", "--search_request=search_r1", "--search_cache="),
            ],
        ),
        (
            ["--corpus", "a", "--index", "b"],
            ["--search_url=", "--no_search=false", "--replay=", "--search_request=search_r1"],
        ),
        (["--record", "a", "corpus"], []),
        (["--search_cache", "a"], []),
    ],
)
def test_a_source_on_the_command_line_unsets_those_that_are_not(words: list[str], unset: list[str]) -> None:
    assert override_source(words) == [*words, *unset]


@pytest.mark.parametrize(
    ("recipe", "words", "expected"),
    [
        (
            {"search_url": "http://127.0.0.1/retrieve", "search_request": "skyrl", "search_cache": "c.db"},
            ["--corpus", "{corpus}"],
            {"corpus": "{corpus}", "search_request": "search_r1", "search_cache": "c.db"},
        ),
        (
            {"corpus": "{corpus}", "search_engine": "tantivy", "search_cache": "c.db"},
            ["--search_url", "http://127.0.0.1/retrieve", "--search_request", "rllm"],
            {"search_engine": "bm25", "search_request": "rllm", "search_cache": "c.db"},
        ),
        (
            {"corpus": "{corpus}", "search_engine": "tantivy", "search_cache": "c.db"},
            ["--corpus", "{corpus}"],
            {"search_engine": "tantivy", "search_cache": "c.db"},
        ),
        (
            {"search_url": "http://127.0.0.1/retrieve", "search_request": "skyrl", "search_cache": "c.db"},
            ["--no_search", "--record", "r.jsonl"],
            {"no_search": True, "search_cache": "", "record": "r.jsonl"},
        ),
    ],
    ids=["server to corpus", "corpus to server", "corpus to corpus", "server to nothing"],
)
def test_what_only_the_former_source_uses_goes_with_it(
    corpus: Path, tmp_path: Path, recipe: dict[str, str], words: list[str], expected: dict[str, Any]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe).replace("{corpus}", str(corpus)))
    words = [word.replace("{corpus}", str(corpus)) for word in words]
    (read,) = TrlParser(SearchArguments).parse_args_and_config(override_source(["--config", str(path), *words]))
    for name, value in expected.items():
        assert getattr(read, name) == (str(corpus) if value == "{corpus}" else value), name


def test_what_the_command_line_gives_is_refused_where_it_cannot_be_used() -> None:
    words = override_source(["--no_search", "--search_cache", "c.db"])
    with pytest.raises(ValueError, match="no_search leaves nothing to keep"):
        TrlParser(SearchArguments).parse_args_and_config(words)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "got none"),
        ({"no_search": True, "search_url": "http://127.0.0.1"}, "got search_url, no_search"),
        ({"index": "gone"}, "`index` is 'gone'"),
        ({"corpus": "gone.jsonl"}, "`corpus` is 'gone.jsonl'"),
        ({"replay": "gone.jsonl"}, "`replay` is 'gone.jsonl'"),
        ({"search_url": "http://127.0.0.1", "search_request": "soap"}, "`search_request` is 'soap', but must be one"),
        ({"no_search": True, "search_request": "rllm"}, "`search_request` is 'rllm', but there is no `search_url`"),
        ({"no_search": True, "search_cache": "c.db"}, "`search_cache` is 'c.db', but no_search"),
        ({"search_url": "http://127.0.0.1:8000"}, "`search_url`: .* such as http://127.0.0.1:8000/retrieve"),
        ({"search_url": "127.0.0.1:8000/retrieve"}, "`search_url`: url must be an http or https URL"),
        (
            {"no_search": True, "record": "gone/r.jsonl"},
            "`record` is 'gone/r.jsonl', but there is no directory 'gone'",
        ),
        (
            {"search_url": "http://127.0.0.1/retrieve", "search_cache": "gone/c.db"},
            "`search_cache` is 'gone/c.db', but there is no directory 'gone'",
        ),
        ({"no_search": True, "search_engine": "tantivy"}, "`search_engine` is 'tantivy', but there is no `corpus`"),
        (
            {"no_search": True, "search_engine": "dense"},
            "`search_engine` is 'dense', but must be one of 'bm25', 'tantivy'",
        ),
    ],
)
def test_bad_arguments_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchArguments(**values)
