"""The search engine that is switched off."""

from __future__ import annotations

from collections.abc import Sequence

from sorl_trl.search.checks import check_request
from sorl_trl.types import Passage


class NoSearch:
    """A `SearchBackend` that never finds anything: what a policy answers with it, it knew or guessed."""

    thread_safe = True

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`."""
        check_request(queries, k)
        return [[] for _ in queries]
