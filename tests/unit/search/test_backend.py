from __future__ import annotations

from sorl_trl.search import BM25Index, SearchBackend, SearchError, SearchUnavailable


def test_a_handler_of_one_failure_never_catches_the_other():
    assert not issubclass(SearchUnavailable, SearchError)
    assert not issubclass(SearchError, SearchUnavailable)


def test_the_embedded_engine_is_a_backend(index: BM25Index):
    backend: SearchBackend = index
    assert [hit.id for hit in backend.search_batch(["Rome"], k=1)[0]] == ["it"]
