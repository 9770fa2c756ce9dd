from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.search.servers import Server

from sorl_trl.search import IndexOutdated, SearchArguments, write_corpus
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


@pytest.mark.parametrize(("engine", "ending"), [("bm25", "index"), ("tantivy", "tantivy")])
def test_a_corpus_is_indexed_beside_it_and_the_index_can_be_named_then(corpus: Path, engine: str, ending: str) -> None:
    """Each engine has an index of its own beside the corpus."""
    by_corpus = SearchArguments(corpus=str(corpus), search_engine=engine)
    by_index = SearchArguments(index=f"{corpus}.{ending}")
    assert found(by_corpus) == found(by_corpus) == found(by_index) == ["7"]
    assert by_corpus.build_search().identity == by_index.build_search().identity
    assert by_index.build_search().identity.startswith(f"{engine}-")
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
    with pytest.raises(ValueError, match="`search_engine` is 'faiss'"):
        SearchArguments(no_search=True, search_engine="faiss")
    with pytest.raises(ValueError, match="none"):
        SearchArguments().build_search()
