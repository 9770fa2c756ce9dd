"""Asks the search engine, and lives with its failures: a search that fails never ends the run."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_before_delay, wait_random_exponential

from sorl_trl.search import SearchBackend, SearchError, SearchUnavailable
from sorl_trl.types import Passage

logger = logging.getLogger(__name__)

_INFRASTRUCTURE_ERRORS = (SearchUnavailable, ConnectionError, TimeoutError, socket.gaierror)
"""Other kinds of OSError, a missing file for one, are mistakes in the set-up: they propagate."""


@dataclass(frozen=True)
class RetryPolicy:
    """When to give up on an engine that is down. Waits grow exponentially, with jitter, up to `max_wait_s`.

    `deadline_s` bounds the attempts and waits together; how long one attempt may take is the engine's own affair.
    The values are ours. Raises ValueError for a value out of range.
    """

    attempts: int = 4
    initial_wait_s: float = 0.5
    max_wait_s: float = 10.0
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts={self.attempts} must be at least 1")
        for name in ("initial_wait_s", "max_wait_s", "deadline_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")

    def retrying(self) -> Retrying:
        """Retries infrastructure errors only, and raises the last one as it is."""
        return Retrying(
            stop=stop_after_attempt(self.attempts) | stop_before_delay(self.deadline_s),
            wait=wait_random_exponential(multiplier=self.initial_wait_s, max=self.max_wait_s),
            retry=retry_if_exception_type(_INFRASTRUCTURE_ERRORS),
            reraise=True,
        )


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
        self._backend = backend
        self._top_k = top_k
        self._retry = retry

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
        except _INFRASTRUCTURE_ERRORS as error:
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
        results = self._retry.retrying()(self._backend.search_batch, queries, self._top_k)
        if len(results) != len(queries):
            raise RuntimeError(
                f"search_batch returned {len(results)} results for {len(queries)} queries: it must return one each"
            )
        return [tuple(passages) for passages in results]
