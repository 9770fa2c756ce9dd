"""A search engine as the environment of all rows. The run continues if the engine fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from sorl_trl.checks import POSITIVE_COUNT
from sorl_trl.rollout.environment import THREAD, Reply, Responder, ResponderRow
from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.search import RetryPolicy, SearchBackend, SearchError
from sorl_trl.search.backend import checked_results, is_down, is_thread_safe
from sorl_trl.threads import DaemonThreads
from sorl_trl.types import StopReason, Turn

logger = logging.getLogger(__name__)

_THREADS = 8
"""Our choice, enough for the turns that end during a slow search."""
_DOWN = Reply(stop=StopReason.SEARCH_UNAVAILABLE)


class SearchResponder(Responder):
    """Answers turns that search. Turns that end while the threads are busy share one call, without repeated queries.

    Args:
        backend: The search engine. If it sets `thread_safe = True`, up to 8 threads call it at the same time, else
            always the same one.
        protocol: How passages become text.
        top_k: The most passages per query.
        retry: How often and how long to retry a search that is down.

    Raises TypeError if the backend has no `search_batch`, and ValueError if `top_k` is below 1.
    """

    def __init__(
        self,
        backend: SearchBackend,
        protocol: TagProtocol | None = None,
        top_k: int = 3,
        retry: RetryPolicy | None = None,
    ) -> None:
        if not callable(getattr(backend, "search_batch", None)):
            raise TypeError(f"search is a {type(backend).__name__}, but must have a method `search_batch`")
        POSITIVE_COUNT.check("top_k", top_k)
        # They live as long as the responder, because what they call may be bound to them.
        self._threads = DaemonThreads(_THREADS if is_thread_safe(backend) else 1, THREAD)
        self._lock = threading.Lock()
        self._asked: list[tuple[str, Future[Reply]]] = []
        """Queries that no thread has taken up."""
        self._backend = backend
        self._protocol = protocol or TagProtocol()
        if self._protocol.turns_are_messages:
            raise ValueError("protocol makes turns of whole messages, but a search needs tags: use `TagProtocol`")
        self.top_k = top_k
        self._retry = retry or RetryPolicy()
        self._is_down = False

    def open(self, examples: Sequence[Mapping[str, Any]]) -> Sequence[ResponderRow]:
        self._is_down = False
        return super().open(examples)

    def ask(self, turns: Mapping[int, Turn]) -> dict[int, Future[Reply]]:
        return dict(zip(turns, self.find([turn.action.content for turn in turns.values()]), strict=True))

    def find(self, queries: Sequence[str]) -> list[Future[Reply]]:
        """Start searching, without waiting. After retries have failed, calls get one attempt until the engine is back.

        A new rollout is patient again.
        """
        replies = [Future[Reply]() for _ in queries]
        with self._lock:  # a new list: a fork has the old one
            self._asked = [*self._asked, *zip(queries, replies, strict=True)]
        self._threads.submit(self._answer)
        return replies

    def close(self) -> None:
        """Drop queries that no thread has taken up. Searches in progress continue, but are ignored."""
        self._take()

    def _take(self) -> list[tuple[str, Future[Reply]]]:
        with self._lock:
            asked, self._asked = self._asked, []
        return asked

    def _answer(self) -> None:
        """Search for all that was asked since a thread was last free. Another thread may have taken it already."""
        if not (asked := self._take()):
            return
        try:
            found = self.search([query for query, _ in asked], patient=not self._is_down)
        except BaseException as error:  # the rollout raises it where it waits for the reply
            for _, reply in asked:
                reply.set_exception(error)
            return
        self._is_down = _DOWN in found.values()
        for query, reply in asked:
            reply.set_result(found[query])

    def search(self, queries: Sequence[str], patient: bool = True) -> dict[str, Reply]:
        """The reply to each distinct query, from one call for all, with a single attempt unless `patient`.

        A refused batch is repeated query by query, so that one bad query does not affect the others. Raises
        RuntimeError if the engine returns the wrong number of results, and any other error of the engine.
        """
        unique = list(dict.fromkeys(queries))
        try:
            found = self._retry.retrying(patient)(self._backend.search_batch, unique, self.top_k)
        except SearchError as error:
            if len(unique) > 1:
                return self._search_one_by_one(unique, patient)
            logger.info("The search engine refused %r: %s", unique[0], error)
            return {unique[0]: Reply(self._protocol.search_failed)}
        except Exception as error:
            if not is_down(error):
                raise
            logger.warning("The search engine is unavailable, so %d queries are given up: %r", len(unique), error)
            return dict.fromkeys(unique, _DOWN)
        results = checked_results(found, unique)
        return {
            query: Reply(self._protocol.render_passages(passages), tuple(passages))
            for query, passages in zip(unique, results, strict=True)
        }

    def _search_one_by_one(self, queries: Sequence[str], patient: bool) -> dict[str, Reply]:
        replies: dict[str, Reply] = {}
        for query in queries:
            replies |= self.search([query], patient)
            if replies[query] == _DOWN:
                # Its retries are used up, and waiting as long for every other query would stall the step.
                return dict.fromkeys(queries, _DOWN) | replies
        return replies
