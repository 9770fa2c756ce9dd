"""Asks the search engine, and lives with its failures: a search that fails never ends the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum

from sorl_trl.search import RetryingSearch, RetryPolicy, SearchBackend, SearchError, SearchUnavailable
from sorl_trl.search.checks import check_results
from sorl_trl.types import Passage

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
