"""How long to retry a search engine that is down."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated

from tenacity import (
    Retrying,
    before_sleep_log,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from sorl_trl.checks import POSITIVE_COUNT, SECONDS, check_fields
from sorl_trl.search.backend import is_down

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetryPolicy:
    """How long to retry an engine that is down. Waits grow exponentially, with jitter, up to `max_wait_s`.

    By default, the deadline ends the retries, which leaves time to restart a server. It bounds attempts and waits
    together: no attempt begins after it. The engine itself limits the time of one attempt. The values are our choice.
    Raises ValueError if a value is out of range.
    """

    attempts: Annotated[int, POSITIVE_COUNT] = 30
    initial_wait_s: Annotated[float, SECONDS] = 0.5
    max_wait_s: Annotated[float, SECONDS] = 10.0
    deadline_s: Annotated[float, SECONDS] = 60.0

    def __post_init__(self) -> None:
        check_fields(self)

    def retrying(self, patient: bool = True) -> Retrying:
        """An object that repeats a call while it raises that a service is down; only one call unless `patient`."""
        return Retrying(
            stop=stop_after_attempt(self.attempts if patient else 1) | stop_before_delay(self.deadline_s),
            wait=wait_random_exponential(multiplier=self.initial_wait_s, max=self.max_wait_s),
            retry=retry_if_exception(is_down),
            before_sleep=before_sleep_log(logger, logging.INFO),
            reraise=True,
        )
