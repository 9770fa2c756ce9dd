"""Many callers at the same time, one call of the search engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from sorl_trl.checks import SECONDS, check_number
from sorl_trl.search.backend import SearchBackend, SearchError, SearchUnavailable, is_thread_safe
from sorl_trl.search.checks import check_request, check_results
from sorl_trl.types import Passage

Request = tuple[str, int]
"""Query, k."""
Answer = Future[list[Passage]]


class CoalescingSearch:
    """A `SearchBackend` for threads: callers that ask at the same time share one call of another backend.

    The first caller leads: it gathers for `window_s`, then asks for its own queries and those of all who came
    meanwhile with the same `k`. Whoever asks for a query that is gathered or being asked waits for that answer. Calls
    of the backend may overlap: while one is under way, the next gathers.

    A failure reaches every caller that waits for it, with one exception: where the backend refuses a merged batch, it
    is asked query by query, so that nobody is refused for what another has asked.

    Place it outside of retries and inside of a cache (see `CachedSearch`).

    Args:
        backend: Must be safe to call from several threads.
        window_s: How long the first caller waits for others. Ours: little against a search over the network.
        sleep: Waits that long; tests put their own.

    Attributes:
        asked: Queries that callers asked for.
        sent: Queries that the backend was asked for, those asked again after a refusal not counted.
    """

    def __init__(
        self, backend: SearchBackend, window_s: float = 0.005, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        check_number("window_s", window_s, SECONDS)
        self._backend = backend
        self._window_s = window_s
        self._sleep = sleep
        self._lock = threading.Lock()
        self._gathering: dict[int, dict[str, Answer]] = {}
        """By k: what the next call will ask. Whoever makes an entry leads that call."""
        self._waited_for: dict[Request, Answer] = {}
        """All that is gathered or being asked."""
        self.asked = 0
        self.sent = 0

    def __reduce__(self) -> tuple[type[CoalescingSearch], tuple[object, ...]]:
        """A copy has no callers yet: they and the lock cannot be copied."""
        return CoalescingSearch, (self._backend, self._window_s, self._sleep)

    @property
    def thread_safe(self) -> bool:
        """Whether what it asks is."""
        return is_thread_safe(self._backend)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`."""
        check_request(queries, k)
        answers, leads = self._join(queries, k)
        if leads:
            self._lead(k)
        return [list(answer.result()) for answer in answers]

    def _join(self, queries: Sequence[str], k: int) -> tuple[list[Answer], bool]:
        """What to wait for, and whether this caller is to make the call."""
        with self._lock:
            self.asked += len(queries)
            new = [query for query in dict.fromkeys(queries) if (query, k) not in self._waited_for]
            leads = bool(new) and k not in self._gathering
            for query in new:
                answer = self._waited_for[query, k] = Answer()
                self._gathering.setdefault(k, {})[query] = answer
            return [self._waited_for[query, k] for query in queries], leads

    def _lead(self, k: int) -> None:
        interruption: BaseException | None = None
        try:
            self._sleep(self._window_s)
        except BaseException as error:  # Ctrl-C: the callers that joined must not wait for ever.
            interruption = error
        with self._lock:
            gathered = self._gathering.pop(k)
            self.sent += len(gathered)
        try:
            if interruption is not None:
                raise interruption
            self._ask(gathered, k)
        except BaseException as error:
            self._settle(gathered, k, error)
            if not isinstance(error, Exception):
                raise

    def _ask(self, gathered: dict[str, Answer], k: int) -> None:
        queries = list(gathered)
        try:
            results = self._backend.search_batch(queries, k)
        except SearchError:
            if len(queries) == 1:
                raise
            self._ask_one_by_one(gathered, k)
            return
        check_results(results, queries)
        for query, passages in zip(queries, results, strict=True):
            self._release(query, k).set_result(passages)

    def _ask_one_by_one(self, gathered: dict[str, Answer], k: int) -> None:
        for query, answer in gathered.items():
            try:
                self._ask({query: answer}, k)
            except SearchError as error:
                self._release(query, k).set_exception(error)

    def _settle(self, gathered: dict[str, Answer], k: int, error: BaseException) -> None:
        """Give all that have no answer yet the error in its place."""
        if not isinstance(error, Exception):
            error = SearchUnavailable(f"the caller that asked for all was interrupted: {error!r}")
        for query, answer in gathered.items():
            if not answer.done():
                self._release(query, k).set_exception(error)

    def _release(self, query: str, k: int) -> Answer:
        """Whoever asks from now on is not given this answer, which is about to be known, but a new one."""
        with self._lock:
            return self._waited_for.pop((query, k))
