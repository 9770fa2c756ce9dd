"""Asks a search engine that is down again, for a while."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from sorl_trl.checks import POSITIVE_COUNT, SECONDS, Checked
from sorl_trl.search.around.breaker import CircuitOpen
from sorl_trl.search.backend import INFRASTRUCTURE_ERRORS, SearchBackend, SearchUnavailable, is_thread_safe
from sorl_trl.types import Passage

logger = logging.getLogger(__name__)


class RetriesExhausted(SearchUnavailable):
    """The engine was asked again and again in vain. Another `RetryingSearch` around this one takes it for final."""


@dataclass(frozen=True)
class RetryPolicy(Checked):
    """How long to go on asking an engine that is down. Waits grow exponentially, with jitter, up to `max_wait_s`.

    By default the deadline ends the retries, so that a server may be started again meanwhile. It bounds the attempts
    and waits together: no attempt begins after it. How long one attempt may take is the engine's own affair. The
    values are ours. Raises ValueError for a value out of range.
    """

    attempts: Annotated[int, POSITIVE_COUNT] = 30
    initial_wait_s: Annotated[float, SECONDS] = 0.5
    max_wait_s: Annotated[float, SECONDS] = 10.0
    deadline_s: Annotated[float, SECONDS] = 60.0


class RetryingSearch:
    """A `SearchBackend` that asks another one again when it is unavailable.

    A `ConnectionError`, a `TimeoutError` or a name that does not resolve counts as unavailable too. Where a
    `CircuitBreaker` inside is open, or a `RetryingSearch` inside has given up, it does not ask again: retries do not
    multiply. Rollouts put one around the backend they are given.

    Place it around the client and inside of a breaker (see `CachedSearch`).

    Args:
        backend: Asked up to `policy.attempts` times.
        policy: When to give up.

    Attributes:
        retries: How often it has asked again.
    """

    def __init__(self, backend: SearchBackend, policy: RetryPolicy | None = None) -> None:
        self._backend = backend
        self._policy = policy or RetryPolicy()
        self._lock = threading.Lock()
        self.retries = 0

    def __reduce__(self) -> tuple[type[RetryingSearch], tuple[object, ...]]:
        """A copy counts from zero: a lock cannot be copied."""
        return RetryingSearch, (self._backend, self._policy)

    @property
    def thread_safe(self) -> bool:
        """Whether what it asks is."""
        return is_thread_safe(self._backend)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Raises `RetriesExhausted`, a `SearchUnavailable`, when it gives up."""
        started = time.monotonic()
        retrying = self._retrying()
        try:
            return retrying(self._backend.search_batch, queries, k)
        except INFRASTRUCTURE_ERRORS as error:
            if not _worth_retrying(error):
                raise
            attempts, seconds = retrying.statistics["attempt_number"], time.monotonic() - started
            raise RetriesExhausted(f"given up after {attempts} attempts in {seconds:.1f} s: {error!r}") from error

    def _retrying(self) -> Retrying:
        policy = self._policy
        return Retrying(
            stop=stop_after_attempt(policy.attempts) | stop_before_delay(policy.deadline_s),
            wait=wait_random_exponential(multiplier=policy.initial_wait_s, max=policy.max_wait_s),
            retry=retry_if_exception(_worth_retrying),
            before_sleep=self._note_retry,
            reraise=True,
        )

    def _note_retry(self, state: RetryCallState) -> None:
        with self._lock:
            self.retries += 1
        error = state.outcome.exception() if state.outcome else None
        logger.info(
            "Search attempt %d failed, asking again in %.1f s: %r", state.attempt_number, state.upcoming_sleep, error
        )


def _worth_retrying(error: BaseException) -> bool:
    return isinstance(error, INFRASTRUCTURE_ERRORS) and not isinstance(error, RetriesExhausted | CircuitOpen)
