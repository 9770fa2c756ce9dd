"""A search engine as the environment of all rows, which lives with its failures: none of them ends the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from sorl_trl.checks import POSITIVE_COUNT
from sorl_trl.rollout.environments.environment import BatchResponder, Reply, RowTurn
from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.search import RetryingSearch, RetryPolicy, SearchBackend, SearchError, SearchUnavailable
from sorl_trl.search.backend import check_backend, check_results, is_thread_safe
from sorl_trl.types import Passage, StopReason

logger = logging.getLogger(__name__)


class SearchFailure(Enum):
    """Why a query has no result."""

    REFUSED = "refused"
    """The engine works and refuses this query: something to tell the policy."""
    UNAVAILABLE = "unavailable"
    """The engine is down: nothing the policy could have done."""


SearchOutcome = tuple[Passage, ...] | SearchFailure


class Retriever:
    """Searches for the queries of a step in one call, each distinct query once."""

    def __init__(self, backend: SearchBackend, top_k: int, retry: RetryPolicy) -> None:
        self._backend = RetryingSearch(backend, retry)
        self._top_k = top_k

    def search(self, queries: Sequence[str]) -> dict[str, SearchOutcome]:
        """The outcome of each distinct query.

        A refused batch is asked again query by query, so that one bad query spoils no other. Raises RuntimeError if
        the engine returns another number of results than it was asked for, and whatever else it raises.
        """
        unique = list(dict.fromkeys(queries))
        if not unique:
            return {}
        try:
            return dict(zip(unique, self._ask(unique), strict=True))
        except SearchError as error:
            if len(unique) > 1:
                return self._search_one_by_one(unique)
            logger.info("The search engine refused %r: %s", unique[0], error)
            return {unique[0]: SearchFailure.REFUSED}
        except SearchUnavailable as error:
            logger.warning("The search engine is unavailable, %d queries are given up: %r", len(unique), error)
            return dict.fromkeys(unique, SearchFailure.UNAVAILABLE)

    def _search_one_by_one(self, queries: Sequence[str]) -> dict[str, SearchOutcome]:
        outcomes: dict[str, SearchOutcome] = {}
        for query in queries:
            outcomes.update(self.search([query]))
            if outcomes[query] is SearchFailure.UNAVAILABLE:
                # Its retries are spent: waiting as long again for every other query would stall the step.
                return dict.fromkeys(queries, SearchFailure.UNAVAILABLE) | outcomes
        return outcomes

    def _ask(self, queries: list[str]) -> list[tuple[Passage, ...]]:
        results = self._backend.search_batch(queries, self._top_k)
        check_results(results, queries)
        return [tuple(passages) for passages in results]


_THREADS = 8
"""Ours: enough for what ends while a slow search is on its way."""


class SearchResponder(BatchResponder):
    """Answers turns that search: those that have ended while the threads were busy share one call, each query once.

    Args:
        backend: Asked by up to `concurrency` threads at the same time.
        protocol: How passages become text.
        top_k: The most passages per query.
        retry: How often and how long a search that is down is tried again.
        concurrency: How many threads search; by default 8 for an engine that says `thread_safe = True`, else 1, which
            is the same in all rollouts.

    Raises TypeError for a backend without `search_batch`, ValueError for a `top_k` or `concurrency` below 1.
    """

    def __init__(
        self,
        backend: SearchBackend,
        protocol: TagProtocol | None = None,
        top_k: int = 3,
        retry: RetryPolicy | None = None,
        concurrency: int | None = None,
    ) -> None:
        check_backend(backend)
        super().__init__((_THREADS if is_thread_safe(backend) else 1) if concurrency is None else concurrency)
        POSITIVE_COUNT.check("top_k", top_k)
        self._protocol = protocol or TagProtocol()
        retry = retry or RetryPolicy()
        self._retriever = Retriever(backend, top_k, retry)
        self._impatient = Retriever(backend, top_k, replace(retry, attempts=1))
        self._is_down = False

    def open(self, examples: Sequence[Mapping[str, Any]]) -> None:
        """See `Responder.open`."""
        self._is_down = False

    def respond(self, turns: Sequence[RowTurn]) -> list[Reply]:
        """See `BatchResponder`. Once retries were in vain, the rest of the rollout makes an attempt each."""
        queries = [each.turn.action.content for each in turns]
        outcomes = (self._impatient if self._is_down else self._retriever).search(queries)
        self._is_down = SearchFailure.UNAVAILABLE in outcomes.values()
        return [self._reply(outcomes[query]) for query in queries]

    def _reply(self, outcome: SearchOutcome) -> Reply:
        if outcome is SearchFailure.UNAVAILABLE:
            return Reply(stop=StopReason.SEARCH_UNAVAILABLE)
        if outcome is SearchFailure.REFUSED:
            return Reply(self._protocol.search_failed)
        return Reply(self._protocol.render_passages(outcome), outcome)
