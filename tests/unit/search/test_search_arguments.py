from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unit.search.servers import Server

from sorl_trl.search import BM25Index, CachedSearch, IndexOutdated, write_corpus
from sorl_trl.search.arguments import SearchArguments
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


def test_a_cache_file_keeps_answers_for_the_next_run(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    arguments = SearchArguments(corpus=str(corpus), search_cache=str(path))
    assert isinstance(arguments.build_search().backend, CachedSearch)
    assert found(arguments) == ["7"]
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE answers SET passages = '[]'")
    connection.close()
    assert found(arguments) == []


def test_a_corpus_is_indexed_with_the_engine_that_is_named(corpus: Path) -> None:
    """Each engine has an index of its own beside the corpus."""
    for engine, ending in (("bm25", "index"), ("tantivy", "tantivy")):
        for _ in range(2):
            arguments = SearchArguments(corpus=str(corpus), search_engine=engine)
            assert found(arguments) == ["7"]
            assert arguments.build_search().identity.startswith(f"{engine}-")
        assert found(SearchArguments(index=f"{corpus}.{ending}")) == ["7"]


def test_a_server_is_named_by_its_url() -> None:
    with closing(Server()) as server:
        arguments = SearchArguments(search_url=server.url)
        assert arguments.build_search().identity == server.url
        private = SearchArguments(search_url=server.url.replace("://", "://me:s3cret@"))
        assert private.build_search().identity == server.url


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"no_search": True, "search_url": "http://127.0.0.1"}, "got search_url, no_search"),
        (
            {"no_search": True, "search_engine": "faiss"},
            "`search_engine` is 'faiss', but must be one of 'bm25', 'tantivy', 'dense'",
        ),
    ],
)
def test_bad_arguments_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchArguments(**values)
