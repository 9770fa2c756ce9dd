"""All searches of a run in a file, from which they can be answered again without the search engine."""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from sorl_trl.search.around.records import from_records, to_records
from sorl_trl.search.backend import SearchBackend, SearchError, SearchUnavailable, is_thread_safe
from sorl_trl.search.checks import check_request, check_results
from sorl_trl.types import Passage

logger = logging.getLogger(__name__)

Outcome = tuple[Passage, ...] | SearchError | SearchUnavailable


class RecordingError(ValueError):
    """A recording cannot be read. The message names the file and the line."""


class NotRecorded(KeyError):
    """A replayed run searches for something that the recorded run did not. The message names the query."""

    def __str__(self) -> str:
        return str(self.args[0])  # A KeyError would show the message as a quoted key.


class RecordingSearch:
    """A `SearchBackend` that records what another answers, as a JSON line per query, before the caller has it.

    A line is `{"query", "k", "passages"}`, `{"query", "k", "refused"}` or `{"query", "k", "unavailable"}`, the last
    two with the error's words. A batch of several that is refused as a whole is not written: it does not say which
    query was refused; callers ask query by query to learn that. Lines are appended to what the file holds, each in one
    piece: a killed process loses at most the line it was writing. Threads may share it; processes need a file each.

    Place it outside of everything else (see `CachedSearch`).

    Args:
        backend: Asked for everything.
        path: The file; made where missing, its directory is not. What an earlier process left of a last line is cut.

    Attributes:
        recorded: Lines written.
    """

    def __init__(self, backend: SearchBackend, path: str | os.PathLike[str]) -> None:
        self._backend = backend
        self._path = Path(path)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, self._descriptor)
        _cut_torn_line(self._path)
        self._lock = threading.Lock()
        self.recorded = 0

    def __reduce__(self) -> tuple[type[RecordingSearch], tuple[object, ...]]:
        """A copy opens the file itself: a descriptor's number means another file elsewhere, or none."""
        return RecordingSearch, (self._backend, self._path)

    @property
    def thread_safe(self) -> bool:
        """Whether what it asks is."""
        return is_thread_safe(self._backend)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`."""
        try:
            results = self._backend.search_batch(queries, k)
        except SearchError as error:
            if len(queries) == 1:
                self._write([{"query": queries[0], "k": k, "refused": str(error)}])
            raise
        except SearchUnavailable as error:
            self._write([{"query": query, "k": k, "unavailable": str(error)} for query in queries])
            raise
        check_results(results, queries)
        pairs = zip(queries, results, strict=True)
        self._write([{"query": query, "k": k, "passages": to_records(passages)} for query, passages in pairs])
        return results

    def _write(self, records: list[dict[str, object]]) -> None:
        lines = memoryview("".join(json.dumps(record) + "\n" for record in records).encode())
        with self._lock:
            while lines:
                lines = lines[os.write(self._descriptor, lines) :]
            self.recorded += len(records)


class ReplayedSearch:
    """A `SearchBackend` that answers, refuses and is unavailable as a recording says, scores included.

    Of several outcomes of one request the last counts, except that `unavailable` never replaces an answer: retries
    came after it. Threads may share it.

    Args:
        path: A file of `RecordingSearch`, read as a whole. An unfinished last line is left out, with a warning.

    Raises:
        FileNotFoundError: There is no such file.
        RecordingError: A line is no record, or there is none.
    """

    thread_safe = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._outcomes: dict[tuple[str, int], Outcome] = {}
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    logger.warning("%s, line %d: unfinished, left out", self._path, number)
                    break
                self._load(line, number)
        if not self._outcomes:
            raise RecordingError(f"{self._path}: the recording is empty; it needs at least one search")

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Raises `NotRecorded` for a query that the recording does not have."""
        check_request(queries, k)
        results = []
        for query in queries:
            outcome = self._outcomes.get((query, k))
            if outcome is None:
                raise NotRecorded(f"{self._path}: the recording has no search for {query!r} with k={k}")
            if isinstance(outcome, Exception):
                raise type(outcome)(*outcome.args)
            results.append(list(outcome))
        return results

    def _load(self, line: bytes, number: int) -> None:
        try:
            request, outcome = _parse(line)
        except (ValueError, RecursionError) as error:
            raise RecordingError(f"{self._path}, line {number}: {error}") from error
        if isinstance(outcome, SearchUnavailable):
            self._outcomes.setdefault(request, outcome)
        else:
            self._outcomes[request] = outcome


def _parse(line: bytes) -> tuple[tuple[str, int], Outcome]:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"a record must be a JSON object, got {type(record).__name__}")
    query, k = record.get("query"), record.get("k")
    if not isinstance(query, str) or not isinstance(k, int):
        raise ValueError(f"a record needs a string `query` and an integer `k`, got {query!r} and {k!r}")
    if "refused" in record:
        return (query, k), SearchError(record["refused"])
    if "unavailable" in record:
        return (query, k), SearchUnavailable(record["unavailable"])
    return (query, k), from_records(record.get("passages"))


def _cut_torn_line(path: Path) -> None:
    """Cut what follows the last newline, so that the next line does not continue it."""
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = _end_of_last_line(file.fileno(), size)
        if end < size:
            logger.warning("%s: %d bytes of an unfinished last line are cut", path, size - end)
            file.truncate(end)


def _end_of_last_line(descriptor: int, size: int) -> int:
    """The offset after the last newline, 0 if there is none. Reads backwards, for recordings get long."""
    block = 1 << 16
    for start in range((size - 1) // block * block, -1, -block):
        newline = os.pread(descriptor, block, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
    return 0
