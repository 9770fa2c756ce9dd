"""Caches the answers of a search engine in a file, for other processes and for the next run."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from sorl_trl.search.backend import SearchBackend, check_request, checked_results, is_thread_safe
from sorl_trl.types import Passage

LONGEST_WAIT_S = 30.0
"""Seconds to wait for another process that writes; our choice."""


class CacheError(ValueError):
    """A cache file cannot be used. The message names it and says what to do."""


class CachedSearch:
    """A `SearchBackend` that asks another engine only new queries: each query once, all in one call.

    Answers are kept in an SQLite file, which several processes and threads may use at once. The file grows without
    bound, and must lie on a local disk, whose locks are reliable. Failures are never kept.

    Args:
        backend: The engine to ask. It must give equal answers to equal requests.
        identity: Identifies the content that is searched, and must change with it: an index's `identity`, or a
            server's URL with a version. Answers under other identities are ignored.
        path: The file, which is created if missing; its folder must exist.

    Raises:
        CacheError: The file is no cache, cannot be opened, or stays locked; also in any later search.
    """

    def __init__(self, backend: SearchBackend, identity: str, path: str | os.PathLike[str]) -> None:
        self._backend = backend
        self._identity = identity
        self._path = Path(path)
        if not self._path.parent.is_dir():
            raise CacheError(f"cache {self._path}: there is no folder {self._path.parent}")
        with self._connect() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, passages TEXT NOT NULL)")

    @property
    def thread_safe(self) -> bool:
        """Whether the engine behind it is thread-safe."""
        return is_thread_safe(self._backend)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Raises what the backend does, and `CacheError`."""
        check_request(queries, k)
        # JSON in ASCII, because a policy may write half a surrogate pair, which SQLite refuses.
        keys = {query: json.dumps([self._identity, query, k]) for query in queries}
        answers = self._read(keys)
        if missing := [query for query in keys if query not in answers]:
            results = checked_results(self._backend.search_batch(missing, k), missing)
            found = dict(zip(missing, results, strict=True))
            self._write({keys[query]: passages for query, passages in found.items()})
            answers |= found
        return [list(answers[query]) for query in queries]

    def _read(self, keys: Mapping[str, str]) -> dict[str, list[Passage]]:
        select = "SELECT passages FROM answers WHERE key = ?"
        with self._connect() as connection:
            rows = {query: connection.execute(select, (key,)).fetchone() for query, key in keys.items()}
        try:
            return {
                query: [Passage(**record) for record in json.loads(row[0])]
                for query, row in rows.items()
                if row is not None
            }
        except (ValueError, TypeError) as error:
            raise self._unusable(error) from error

    def _write(self, answers: Mapping[str, Sequence[Passage]]) -> None:
        found = {key: [vars(passage) for passage in passages] for key, passages in answers.items()}
        rows = [(key, json.dumps(records, default=float)) for key, records in found.items()]  # scores may be NumPy's
        with self._connect() as connection:
            connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """A connection for one call, because it must not cross a fork or a thread; committed and closed at the end."""
        try:
            connection = sqlite3.connect(self._path, timeout=LONGEST_WAIT_S)
            try:
                with connection:
                    yield connection
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> CacheError:
        return CacheError(
            f"cache {self._path}: {error}; delete the file to start an empty cache, or name another path"
        )
