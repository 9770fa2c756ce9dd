"""Asks a search engine that is down again, for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tenacity import (
    Retrying,
    before_sleep_log,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from sorl_trl.checks import POSITIVE_COUNT, SECONDS, check_fields
from sorl_trl.search.backend import INFRASTRUCTURE_ERRORS, SearchBackend, SearchUnavailable, is_thread_safe
from sorl_trl.types import Passage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetryPolicy:
    """How long to go on asking an engine that is down. Waits grow exponentially, with jitter, up to `max_wait_s`.

    By default the deadline ends the retries, so that a server may be started again meanwhile. It bounds the attempts
    and waits together: no attempt begins after it. How long one attempt may take is the engine's own affair. The
    values are ours. Raises ValueError for a value out of range.
    """

    attempts: Annotated[int, POSITIVE_COUNT] = 30
    initial_wait_s: Annotated[float, SECONDS] = 0.5
    max_wait_s: Annotated[float, SECONDS] = 10.0
    deadline_s: Annotated[float, SECONDS] = 60.0

    def __post_init__(self) -> None:
        check_fields(self)


class RetryingSearch:
    """A `SearchBackend` that asks another one again when it is unavailable.

    A `ConnectionError`, a `TimeoutError` or a name that does not resolve counts as unavailable too. Rollouts put one
    around the backend they are given.

    Args:
        backend: Asked up to `policy.attempts` times.
        policy: When to give up.
    """

    def __init__(self, backend: SearchBackend, policy: RetryPolicy | None = None) -> None:
        self._backend = backend
        self._policy = policy or RetryPolicy()

    @property
    def thread_safe(self) -> bool:
        """Whether what it asks is."""
        return is_thread_safe(self._backend)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Raises `SearchUnavailable` when it gives up."""
        started = time.monotonic()
        retrying = self._retrying()
        try:
            return retrying(self._backend.search_batch, queries, k)
        except INFRASTRUCTURE_ERRORS as error:
            attempts, seconds = retrying.statistics["attempt_number"], time.monotonic() - started
            raise SearchUnavailable(f"given up after {attempts} attempts in {seconds:.1f} s: {error!r}") from error

    def _retrying(self) -> Retrying:
        policy = self._policy
        return Retrying(
            stop=stop_after_attempt(policy.attempts) | stop_before_delay(policy.deadline_s),
            wait=wait_random_exponential(multiplier=policy.initial_wait_s, max=policy.max_wait_s),
            retry=retry_if_exception_type(INFRASTRUCTURE_ERRORS),
            before_sleep=before_sleep_log(logger, logging.INFO),
            reraise=True,
        )
