from __future__ import annotations

import pickle
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.search.backends import FakeSearch, LosingSearch, found

from sorl_trl.search import SearchError, SearchUnavailable
from sorl_trl.search.around.cache import CachedSearch, CacheError, CacheStore, MemoryStore, SQLiteStore
from sorl_trl.types import Passage

PASSAGES = (Passage("7", "Paris", "東京 \ud800 \x00 'quoted'", 0.1 + 0.2), Passage("", "", "", None))


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CacheStore:
    return MemoryStore(100) if request.param == "memory" else SQLiteStore(tmp_path / "cache.sqlite")


def test_only_misses_are_asked_once_each_in_one_call(store: CacheStore) -> None:
    backend = FakeSearch()
    search = CachedSearch(backend, "index", store)
    assert search.search_batch(["a", "b", "a"], 3) == [found("a", 3), found("b", 3), found("a", 3)]
    assert search.search_batch(["c", "b", "d", "c"], 3) == [found(query, 3) for query in "cbdc"]
    assert search.search_batch(["a", "d"], 3) == [found("a", 3), found("d", 3)]
    assert backend.calls == [["a", "b"], ["c", "d"]]
    assert (search.hits, search.misses) == (5, 4)


def test_identity_query_and_k_are_the_key(store: CacheStore) -> None:
    backend = FakeSearch()
    for identity, query, k in [("x", "abc", 1), ("x", "abc", 2), ("y", "abc", 1), ("x", "Abc", 1)]:
        for _ in range(2):
            assert CachedSearch(backend, identity, store).search_batch([query], k) == [found(query, k)]
    assert backend.calls == [["abc"], ["abc"], ["abc"], ["Abc"]]


@pytest.mark.parametrize("error", [SearchError("refused"), SearchUnavailable("down"), KeyError("bug")])
def test_failures_are_never_kept(store: CacheStore, error: Exception) -> None:
    search = CachedSearch(FakeSearch([error]), "index", store)
    with pytest.raises(type(error)) as caught:
        search.search_batch(["a", "b"], 3)
    assert caught.value is error
    assert search.search_batch(["a", "b"], 3) == [found("a", 3), found("b", 3)]
    assert (search.hits, search.misses) == (0, 4)


def test_what_is_known_needs_no_engine(store: CacheStore) -> None:
    backend = FakeSearch()
    search = CachedSearch(backend, "index", store)
    search.search_batch(["a"], 3)
    backend.failures = [SearchUnavailable("down")]
    assert search.search_batch(["a"], 3) == [found("a", 3)]


def test_an_empty_answer_is_an_answer(store: CacheStore) -> None:
    backend = FakeSearch()
    search = CachedSearch(backend, "index", store)
    assert search.search_batch([""], 3) == search.search_batch([""], 3) == [[]]
    assert backend.calls == [[""]]


def test_callers_cannot_change_what_is_kept(store: CacheStore) -> None:
    search = CachedSearch(FakeSearch(), "index", store)
    search.search_batch(["a"], 3)[0].clear()
    search.search_batch(["a"], 3)[0].clear()
    assert search.search_batch(["a"], 3) == [found("a", 3)]


def test_a_store_gives_back_exactly_what_it_was_given(store: CacheStore) -> None:
    key, other = ("index", "half a \ud800 pair", 3), ("index", 'a", 3]', 3)
    store.write({key: PASSAGES})
    assert store.read([key, other]) == {key: PASSAGES}
    store.write({key: (), other: PASSAGES})
    assert store.read([other, key]) == {key: (), other: PASSAGES}


def test_nothing_is_lost_silently(store: CacheStore) -> None:
    with pytest.raises(RuntimeError, match="1 results for 2 queries"):
        CachedSearch(LosingSearch(), "index", store).search_batch(["a", "b"], 3)
    with pytest.raises(ValueError, match="`k` is 0, but must be a whole number, at least 1"):
        CachedSearch(FakeSearch(), "index", store).search_batch([], 0)
    with pytest.raises(ValueError, match="identity"):
        CachedSearch(FakeSearch(), "", store)


batches = st.lists(st.tuples(st.lists(st.text(max_size=3), max_size=5), st.integers(1, 3)), max_size=8)


@given(batches=batches, max_entries=st.integers(1, 6))
def test_a_cache_is_never_noticed(batches: list[tuple[list[str], int]], max_entries: int) -> None:
    """Whatever was asked before, and however much was forgotten."""
    backend = FakeSearch()
    search = CachedSearch(backend, "index", MemoryStore(max_entries))
    for queries, k in batches:
        assert search.search_batch(queries, k) == FakeSearch().search_batch(queries, k)
    assert search.misses == sum(map(len, backend.calls))
    assert search.hits + search.misses == sum(len(queries) for queries, _ in batches)


@settings(max_examples=20, deadline=None)
@given(batches=batches)
def test_a_cache_file_is_never_noticed(tmp_path_factory: pytest.TempPathFactory, batches) -> None:
    path = tmp_path_factory.mktemp("cache") / "cache.sqlite"
    backend = FakeSearch()
    for queries, k in batches:
        search = CachedSearch(backend, "index", SQLiteStore(path))
        assert search.search_batch(queries, k) == FakeSearch().search_batch(queries, k)
    assert sum(map(len, backend.calls)) == len({(query, k) for queries, k in batches for query in queries})


def test_memory_forgets_what_was_not_read_for_longest() -> None:
    backend = FakeSearch()
    search = CachedSearch(backend, "index", MemoryStore(2))
    for query in ["a", "b", "a", "c", "a", "b"]:
        search.search_batch([query], 3)
    assert backend.calls == [["a"], ["b"], ["c"], ["b"]]


def test_a_batch_larger_than_the_memory_is_answered() -> None:
    search = CachedSearch(FakeSearch(), "index", MemoryStore(1))
    for _ in range(2):
        assert search.search_batch(["a", "b", "c"], 3) == [found(query, 3) for query in "abc"]


def test_a_memory_without_room_is_named() -> None:
    with pytest.raises(ValueError, match="`max_entries` is 0, but must be a whole number, at least 1"):
        MemoryStore(0)


def test_threads_share_a_store(store: CacheStore) -> None:
    search = CachedSearch(FakeSearch(), "index", store)
    start = threading.Barrier(4, timeout=20)
    wrong: list[object] = []

    def ask(number: int) -> None:
        start.wait()
        for i in range(20):
            queries = [f"q{(number + i) % 7}", f"q{i % 3}"]
            if search.search_batch(queries, 2) != [found(query, 2) for query in queries]:
                wrong.append(queries)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert search.hits + search.misses == 4 * 20 * 2


WORKER = """
import sys
from sorl_trl.search.around.cache import SQLiteStore
from sorl_trl.types import Passage
path, name = sys.argv[1:]
for i in range(30):
    store = SQLiteStore(path)
    store.write({("index", f"{name}{i}", 3): (Passage(name, "", str(i)),), ("index", "shared", 3): ()})
    assert len(store.read([("index", f"{name}{j}", 3) for j in range(i + 1)])) == i + 1
"""


@pytest.mark.trains
def test_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(path), name]) for name in ("x", "y")]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    keys = [("index", f"{name}{i}", 3) for name in ("x", "y") for i in range(30)]
    assert len(SQLiteStore(path).read([*keys, ("index", "shared", 3)])) == 61


def test_threads_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    start = threading.Barrier(8, timeout=20)
    errors: list[Exception] = []

    def open_store() -> None:
        start.wait()
        try:
            SQLiteStore(tmp_path / "cache.sqlite").write({("index", "a", 3): PASSAGES})
        except CacheError as error:
            errors.append(error)

    threads = [threading.Thread(target=open_store) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_new_file_is_waited_for(tmp_path: Path) -> None:
    """While another process is about to write it, SQLite refuses the switch to a log at once, whatever its timeout."""
    path = tmp_path / "cache.sqlite"
    other = sqlite3.connect(path, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    leaves = threading.Timer(0.3, other.close)
    leaves.start()
    SQLiteStore(path).write({("index", "a", 3): PASSAGES})
    leaves.join()
    assert SQLiteStore(path).read([("index", "a", 3)]) == {("index", "a", 3): PASSAGES}


def not_a_database(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)


def another_table(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE answers (other INTEGER)")
    connection.close()


def no_json(path: Path) -> None:
    SQLiteStore(path).write({("index", "a", 3): PASSAGES})
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE answers SET passages = '{'")
    connection.close()


def no_passages(path: Path) -> None:
    SQLiteStore(path).write({("index", "a", 3): PASSAGES})
    with sqlite3.connect(path) as connection:
        connection.execute("""UPDATE answers SET passages = '[{"identifier": 3}]'""")
    connection.close()


def a_directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("damage", [not_a_database, another_table, no_json, no_passages, a_directory])
def test_a_file_that_is_no_cache_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "cache.sqlite"
    damage(path)
    with pytest.raises(CacheError, match=r"cache .*cache\.sqlite: .*; delete the file to start an empty cache"):
        SQLiteStore(path).read([("index", "a", 3)])


def test_a_file_that_stays_locked_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    store = SQLiteStore(path, timeout_s=0)
    store.write({("index", "a", 3): PASSAGES})
    holder = sqlite3.connect(path)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(CacheError, match=r"cache\.sqlite: another process .* locked for more than timeout_s=0"):
        store.write({("index", "b", 3): PASSAGES})
    assert store.read([("index", "a", 3)]) == {("index", "a", 3): PASSAGES}  # Reading needs no lock.
    holder.rollback()
    holder.close()
    store.write({("index", "b", 3): PASSAGES})


def test_a_copy_of_a_cache(tmp_path: Path) -> None:
    search = CachedSearch(FakeSearch(), "index", SQLiteStore(tmp_path / "cache.sqlite"))
    search.search_batch(["a"], 3)
    copy = pickle.loads(pickle.dumps(search))
    assert copy.search_batch(["a"], 3) == [found("a", 3)]
    assert (copy.hits, copy.misses) == (1, 0)
    in_memory = pickle.loads(pickle.dumps(CachedSearch(FakeSearch(), "index", MemoryStore(5))))
    assert in_memory.search_batch(["a"], 3) == [found("a", 3)]
