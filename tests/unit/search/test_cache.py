from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.unit.search.backends import FakeSearch, LosingSearch, found

from sorl_trl.search import CachedSearch, CacheError, SearchError, SearchUnavailable
from sorl_trl.types import Passage

Cached = Callable[..., CachedSearch]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.sqlite"


@pytest.fixture
def cached(path: Path) -> Cached:
    """A cache around an engine; all of them in the same file."""
    return lambda backend, identity="index": CachedSearch(backend, identity, path)


def test_only_misses_are_asked_once_each_in_one_call(cached: Cached) -> None:
    backend = FakeSearch()
    assert cached(backend).search_batch(["a", "b", "a"], 3) == [found("a", 3), found("b", 3), found("a", 3)]
    search = cached(backend)
    assert search.search_batch(["c", "b", "d", "c"], 3) == [found(query, 3) for query in "cbdc"]
    assert search.search_batch(["a", "d"], 3) == [found("a", 3), found("d", 3)]
    assert search.search_batch([], 3) == []
    assert backend.calls == [["a", "b"], ["c", "d"]]


def test_identity_query_and_k_are_the_key(cached: Cached) -> None:
    backend = FakeSearch()
    for identity, query, k in [("x", "abc", 1), ("x", "abc", 2), ("y", "abc", 1), ("x", "Abc", 1)]:
        for _ in range(2):
            assert cached(backend, identity).search_batch([query], k) == [found(query, k)]
    assert backend.calls == [["abc"], ["abc"], ["abc"], ["Abc"]]


@pytest.mark.parametrize("error", [SearchError("refused"), SearchUnavailable("down")])
def test_failures_are_never_kept(cached: Cached, error: Exception) -> None:
    search = cached(FakeSearch([error]))
    with pytest.raises(type(error)) as caught:
        search.search_batch(["a", "b"], 3)
    assert caught.value is error
    assert search.search_batch(["a", "b"], 3) == [found("a", 3), found("b", 3)]


def test_answers_come_back_exactly(cached: Cached) -> None:
    odd = [Passage("7", "Paris", "東京 \ud800 \x00 'quoted'", 0.1 + 0.2), Passage("", "", "", None)]
    odd += [Passage("8", "", "", np.float32(0.5))]  # type: ignore[arg-type]

    class Odd:
        def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            return [odd for _ in queries]

    queries = ["half a \ud800 pair", 'a", 3]']
    assert cached(Odd()).search_batch(queries, 3) == [odd, odd]
    assert cached(FakeSearch([KeyError("asked")])).search_batch(queries, 3) == [odd, odd]


def test_nothing_is_lost_silently(cached: Cached) -> None:
    with pytest.raises(RuntimeError, match="1 results for 2 queries"):
        cached(LosingSearch()).search_batch(["a", "b"], 3)


WORKER = """
import sys
from sorl_trl.search import CachedSearch
from tests.unit.search.backends import FakeSearch
path, name = sys.argv[1:]
for i in range(30):
    CachedSearch(FakeSearch(), "index", path).search_batch([f"{name}{i}", "shared"], 3)
"""


@pytest.mark.trains
def test_processes_share_a_file(cached: Cached, path: Path) -> None:
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(path), name]) for name in ("x", "y")]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    backend = FakeSearch()
    cached(backend).search_batch([*(f"{name}{i}" for name in ("x", "y") for i in range(30)), "shared"], 3)
    assert backend.calls == []


def execute(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"no database at all" * 100), Path.mkdir])
def test_a_file_that_is_no_database_is_named(cached: Cached, path: Path, damage: Callable[[Path], object]) -> None:
    damage(path)
    with pytest.raises(CacheError, match=r"cache .*cache\.sqlite"):
        cached(FakeSearch())


@pytest.mark.parametrize(
    "statement", ["ALTER TABLE answers RENAME COLUMN key TO other", "UPDATE answers SET passages = '{'"]
)
def test_a_database_that_is_no_cache_is_named(cached: Cached, path: Path, statement: str) -> None:
    cached(FakeSearch()).search_batch(["a"], 3)
    execute(path, statement)
    with pytest.raises(CacheError, match=r"cache .*cache\.sqlite"):
        cached(FakeSearch()).search_batch(["a"], 3)
