"""What the rollout asks of a search engine, and the two ways in which one may fail."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

from sorl_trl.types import Passage


class SearchError(Exception):
    """The engine works but refuses this request. The policy is told so and may ask differently.

    One query is enough to have a whole batch refused: ask query by query to learn which.
    """


class SearchUnavailable(Exception):
    """The engine cannot be reached or is broken. This says nothing about the policy, so its trajectory is masked out.

    Not a `SearchError`, so that no handler of one catches the other. Any other exception is a programming error.
    """


INFRASTRUCTURE_ERRORS = (SearchUnavailable, ConnectionError, TimeoutError, socket.gaierror)
"""What counts as `SearchUnavailable`. Other kinds of OSError, a missing file for one, are mistakes in the set-up."""


class SearchBackend(Protocol):
    """What the rollout needs of a search engine: one method, which may be asked anything.

    An attribute `thread_safe = True` says that several threads may call it at the same time. Without it, one does.
    """

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Search for several queries at once.

        Args:
            queries: Any text, as a policy wrote it. No query may crash the engine: one without a hit gives `[]`.
            k: The most passages per query, at least 1.

        Returns:
            One list per query, in the order of `queries`; its passages best first.

        Raises:
            SearchError: The engine refuses this request.
            SearchUnavailable: The engine cannot serve any request now.
            ValueError: `k` is below 1.
        """
        ...


def is_thread_safe(backend: SearchBackend) -> bool:
    """Whether the engine says that several threads may call it at the same time."""
    return bool(getattr(backend, "thread_safe", False))
