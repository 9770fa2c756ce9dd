"""Backends for the tests of what goes around one, and a corpus."""

from __future__ import annotations

from collections.abc import Sequence

from sorl_trl.types import Passage

PASSAGES = [
    Passage("fr", "France", "The capital of France is Paris."),
    Passage("it", "Italy", "The capital of Italy is Rome; its river is the Tiber."),
    Passage("cw", "Curaçao", "Willemstad is the largest town."),
    Passage("jp", "東京", "東京は日本の首都。"),
    Passage("twin1", "Twin", "Gemini stars"),
    Passage("twin2", "Twin", "Gemini stars"),
    Passage("blank", "", "?!"),
]
"""A corpus: accents, Japanese, twins, and one without a word."""


def found(query: str, k: int) -> list[Passage]:
    """What `FakeSearch` finds: as many passages as the query has characters, at most `k`."""
    return [Passage(f"{query}-{i}", query.upper(), f"{query} of {k}", 1 / (i + 3)) for i in range(min(k, len(query)))]


class FakeSearch:
    """A deterministic engine that notes its calls and first raises `failures`, one per call."""

    def __init__(self, failures: Sequence[BaseException] = ()) -> None:
        self.failures = list(failures)
        self.calls: list[list[str]] = []

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.calls.append(list(queries))
        if self.failures:
            raise self.failures.pop(0)
        return [found(query, k) for query in queries]
