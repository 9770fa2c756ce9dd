"""Answers of a search engine, kept: in memory for one process, in SQLite for several and for the next run."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from cachetools import LRUCache
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random

from sorl_trl.checks import POSITIVE_COUNT, check_number
from sorl_trl.search.around.records import from_records, to_records
from sorl_trl.search.backend import SearchBackend, is_thread_safe
from sorl_trl.search.checks import check_request, check_results
from sorl_trl.types import Passage

CacheKey = tuple[str, str, int]
"""Identity of the index, query, k."""


class CacheError(RuntimeError):
    """A cache file cannot be used. The message names it and says what to do."""


class CacheStore(Protocol):
    """A place where answers are kept. Threads may share it."""

    def read(self, keys: Sequence[CacheKey]) -> dict[CacheKey, tuple[Passage, ...]]:
        """Return the answers that are there; keys without one are left out."""
        ...

    def write(self, answers: Mapping[CacheKey, tuple[Passage, ...]]) -> None:
        """Keep these answers, in place of any under the same keys."""
        ...


class CachedSearch:
    """A `SearchBackend` that asks another only what it has not asked it before: each query once, all in one call.

    The wrappers of this package go around each other in this order, each of them optional:

        backend = HTTPSearch("http://127.0.0.1:8000/retrieve")
        backend = RetryingSearch(backend)       # rides out a server that is started again
        backend = CircuitBreaker(backend, failures=1)   # and, once that has failed, fails at once for a while
        backend = CoalescingSearch(backend)     # many callers wait for one attempt and its retries
        backend = CachedSearch(backend, identity, store)    # a hit waits for nothing
        backend = RecordingSearch(backend, path)            # hits are recorded too

    Failures are never kept. The backend must give equal answers to equal requests.

    Args:
        backend: Asked for what `store` has not.
        identity: Names the content that is searched, and changes with it: an index's `identity`, or a server's URL
            with a version. Answers for another identity are not seen.
        store: Where answers are kept.

    Attributes:
        hits: Queries answered without asking for them, those repeated within a batch included.
        misses: Queries asked, whether or not the backend then answered.
    """

    def __init__(self, backend: SearchBackend, identity: str, store: CacheStore) -> None:
        if not identity:
            raise ValueError("identity must name the content that is searched, got an empty string")
        self._backend = backend
        self._identity = identity
        self._store = store
        self._lock = threading.Lock()
        self.hits = 0
        self.misses = 0

    def __reduce__(self) -> tuple[type[CachedSearch], tuple[object, ...]]:
        """A copy counts from zero: a lock cannot be copied."""
        return CachedSearch, (self._backend, self._identity, self._store)

    @property
    def thread_safe(self) -> bool:
        """Whether what it asks is."""
        return is_thread_safe(self._backend)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Raises what the backend does, and `CacheError`."""
        check_request(queries, k)
        keys = {query: (self._identity, query, k) for query in queries}
        answers = self._store.read(list(keys.values()))
        missing = [query for query, key in keys.items() if key not in answers]
        with self._lock:
            self.hits += len(queries) - len(missing)
            self.misses += len(missing)
        if missing:
            answers |= self._ask(missing, k)
        return [list(answers[keys[query]]) for query in queries]

    def _ask(self, queries: list[str], k: int) -> dict[CacheKey, tuple[Passage, ...]]:
        results = self._backend.search_batch(queries, k)
        check_results(results, queries)
        pairs = zip(queries, results, strict=True)
        answers = {(self._identity, query, k): tuple(passages) for query, passages in pairs}
        self._store.write(answers)
        return answers


class MemoryStore:
    """A `CacheStore` in memory, which forgets what has not been read for longest. A copy starts empty.

    Args:
        max_entries: The most answers it keeps, at least 1. Three passages of 100 words take about 3 kB.
    """

    def __init__(self, max_entries: int) -> None:
        check_number("max_entries", max_entries, POSITIVE_COUNT)
        self._max_entries = max_entries
        self._answers: LRUCache[CacheKey, tuple[Passage, ...]] = LRUCache(max_entries)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[MemoryStore], tuple[int]]:
        return MemoryStore, (self._max_entries,)

    def read(self, keys: Sequence[CacheKey]) -> dict[CacheKey, tuple[Passage, ...]]:
        """See `CacheStore.read`."""
        with self._lock:
            return {key: self._answers[key] for key in keys if key in self._answers}

    def write(self, answers: Mapping[CacheKey, tuple[Passage, ...]]) -> None:
        """See `CacheStore.write`."""
        with self._lock:
            self._answers.update(answers)


class SQLiteStore:
    """A `CacheStore` in a file that several processes use at once. It grows without bound.

    A connection lives for one call: it may cross neither a fork nor, in most builds, a thread. The file must be on a
    local disk: the write-ahead log that lets processes read while one writes needs shared memory.

    Args:
        path: The file; made where missing, its directory is not.
        timeout_s: How long to wait for another process that writes.

    Raises:
        CacheError: The file is no cache, cannot be opened, or stays locked; at once or in any later call.
    """

    def __init__(self, path: str | os.PathLike[str], timeout_s: float = 30.0) -> None:
        self._path = Path(path)
        self._timeout_s = timeout_s
        with self._connect() as connection:
            _switch_to_log(connection, timeout_s)
            connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, passages TEXT NOT NULL)")

    def read(self, keys: Sequence[CacheKey]) -> dict[CacheKey, tuple[Passage, ...]]:
        """See `CacheStore.read`."""
        answers = {}
        with self._connect() as connection:
            for key in keys:
                row = connection.execute("SELECT passages FROM answers WHERE key = ?", (json.dumps(key),)).fetchone()
                if row is not None:
                    answers[key] = self._decode(row[0])
        return answers

    def write(self, answers: Mapping[CacheKey, tuple[Passage, ...]]) -> None:
        """See `CacheStore.write`."""
        # JSON in ASCII: SQLite takes no half of a surrogate pair, and a policy may write one.
        rows = [(json.dumps(key), json.dumps(to_records(passages))) for key, passages in answers.items()]
        with self._connect() as connection:
            connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """A connection, committed and closed at the end."""
        try:
            connection = sqlite3.connect(self._path, timeout=self._timeout_s)
            try:
                with connection:
                    yield connection
            finally:
                connection.close()
        except sqlite3.Error as error:
            if _is_locked(error):
                raise CacheError(
                    f"cache {self._path}: another process has kept it locked for more than timeout_s={self._timeout_s}"
                ) from error
            raise self._unusable(error) from error

    def _decode(self, passages: str) -> tuple[Passage, ...]:
        try:
            return from_records(json.loads(passages))
        except ValueError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> CacheError:
        return CacheError(
            f"cache {self._path}: {error}; delete the file to start an empty cache, or name another path"
        )


def _switch_to_log(connection: sqlite3.Connection, timeout_s: float) -> None:
    """Give a new file its write-ahead log. While another process opens it too, SQLite refuses that without waiting."""
    patiently = Retrying(
        retry=retry_if_exception(_is_locked),
        stop=stop_after_delay(timeout_s),
        wait=wait_random(0.0, 0.05),
        reraise=True,
    )
    patiently(connection.execute, "PRAGMA journal_mode = WAL")


def _is_locked(error: BaseException) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
