"""Caches the answers of a search engine in a file, for other processes and for the next run."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

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
        self._backend, self._identity, self._path = backend, identity, path
        self.thread_safe = is_thread_safe(backend)
        with self._connect() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, passages TEXT NOT NULL)")

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Raises what the backend does, and `CacheError`."""
        check_request(queries, k)
        # JSON in ASCII, because a policy may write half a surrogate pair, which SQLite refuses.
        keys = {query: json.dumps([self._identity, query, k]) for query in queries}
        answers: dict[str, list[Passage]] = {}
        with self._connect() as connection:
            for query, key in keys.items():
                for (passages,) in connection.execute("SELECT passages FROM answers WHERE key = ?", (key,)):
                    answers[query] = [Passage(**record) for record in json.loads(passages)]
        if missing := [query for query in keys if query not in answers]:
            found = checked_results(self._backend.search_batch(missing, k), missing)
            answers |= zip(missing, found, strict=True)
            records = [[vars(passage) for passage in passages] for passages in found]
            texts = [json.dumps(each, default=float) for each in records]  # scores may be NumPy's
            rows = zip((keys[query] for query in missing), texts, strict=True)
            with self._connect() as connection:
                connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)
        return [list(answers[query]) for query in queries]

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """A connection for one call, because it must not cross a fork or a thread; committed and closed at the end."""
        try:
            with closing(sqlite3.connect(self._path, timeout=LONGEST_WAIT_S)) as connection, connection:
                yield connection
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise CacheError(
                f"cache {self._path}: {error}; delete the file to start an empty cache, or name another path"
            ) from error
