"""Leaves a search engine that is down alone for a while, instead of having every search wait for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from sorl_trl.checks import POSITIVE_COUNT, SECONDS, check_number
from sorl_trl.search.backend import (
    INFRASTRUCTURE_ERRORS,
    SearchBackend,
    SearchError,
    SearchUnavailable,
    is_thread_safe,
)
from sorl_trl.types import Passage

logger = logging.getLogger(__name__)


class CircuitOpen(SearchUnavailable):
    """The backend was not asked, because it has failed too often in a row and is left alone for now."""


class CircuitBreaker:
    """A `SearchBackend` that stops asking another one after it was unavailable `failures` times in a row.

    It is then open: every search fails at once, for `recovery_s`. After that, one search goes through as a probe while
    the others still fail: its success closes the breaker, its failure opens it for as long again. `SearchError` is no
    failure: the engine works and refuses. Any other exception is a programming error and says nothing of the engine.

    Place it outside of retries: what it counts are searches that were given up (see `CachedSearch`).

    Args:
        backend: Asked while the breaker is closed.
        failures: How many in a row open it, at least 1. Ours.
        recovery_s: How long it stays open. Ours.
        clock: The time in seconds, from any start.

    Attributes:
        opened: How often it has opened, after a failed probe too.
        rejected: Searches that failed at once.
    """

    # Our own: pybreaker holds its lock while a call lasts, so that threads would search one after another.

    def __init__(
        self,
        backend: SearchBackend,
        failures: int = 5,
        recovery_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_number("failures", failures, POSITIVE_COUNT)
        check_number("recovery_s", recovery_s, SECONDS)
        self._backend = backend
        self._failures = failures
        self._recovery_s = recovery_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failed_in_row = 0
        self._opened_at: float | None = None
        self._probing = False
        self.opened = 0
        self.rejected = 0

    def __reduce__(self) -> tuple[type[CircuitBreaker], tuple[object, ...]]:
        """A copy starts closed: the lock cannot be copied, nor the time elsewhere be compared."""
        return CircuitBreaker, (self._backend, self._failures, self._recovery_s, self._clock)

    @property
    def thread_safe(self) -> bool:
        """Whether what it asks is."""
        return is_thread_safe(self._backend)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Raises `CircuitOpen`, a `SearchUnavailable`, while it is open."""
        probe = self._admit()
        try:
            results = self._backend.search_batch(queries, k)
        except INFRASTRUCTURE_ERRORS as error:
            self._failed(probe, error)
            raise
        except SearchError:
            self._worked(probe)
            raise
        except BaseException:
            self._learnt_nothing(probe)
            raise
        self._worked(probe)
        return results

    def _admit(self) -> bool:
        """Whether this search is the probe. Raises `CircuitOpen` if it may not go through."""
        with self._lock:
            if self._opened_at is None:
                return False
            now = self._clock()
            since, remaining = now - self._opened_at, self._opened_at + self._recovery_s - now
            if self._probing or remaining > 0:
                self.rejected += 1
                until = "until the probe under way succeeds" if self._probing else f"for another {remaining:.1f} s"
                raise CircuitOpen(
                    f"the search engine failed {self._failed_in_row} times in a row and has been left alone for "
                    f"{since:.1f} s; it is not asked {until}"
                )
            self._probing = True
            return True

    def _failed(self, probe: bool, error: Exception) -> None:
        with self._lock:
            if self._opened_at is not None and not probe:
                return  # Asked before it opened: nothing new.
            self._probing = False
            self._failed_in_row += 1
            if not probe and self._failed_in_row < self._failures:
                return
            self._opened_at = self._clock()
            self.opened += 1
        logger.warning(
            "The search engine failed %d times in a row and is left alone for %.1f s: %r",
            self._failed_in_row,
            self._recovery_s,
            error,
        )

    def _worked(self, probe: bool) -> None:
        with self._lock:
            if self._opened_at is not None and not probe:
                return  # Asked before it opened: only the probe closes it.
            self._failed_in_row = 0
            self._opened_at = None
            self._probing = False
        if probe:
            logger.info("The search engine works again")

    def _learnt_nothing(self, probe: bool) -> None:
        with self._lock:
            if probe:
                self._probing = False
