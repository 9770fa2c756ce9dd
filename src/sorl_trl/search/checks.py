"""What every backend checks of a request, and every wrapper of the results it was given."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from sorl_trl.checks import POSITIVE_COUNT, check_number


def check_request(queries: Sequence[str], k: int) -> None:
    """Raise `ValueError` for a `k` below 1, `TypeError` for one string in place of a sequence of them."""
    check_number("k", k, POSITIVE_COUNT)
    if isinstance(queries, str):
        raise TypeError(f"queries must be a sequence of strings, got the string {queries!r}")


def check_results(results: Sized, queries: Sized) -> None:
    """Raise `RuntimeError` unless there is one result per query: a backend that loses one has a bug."""
    if len(results) != len(queries):
        raise RuntimeError(
            f"search_batch returned {len(results)} results for {len(queries)} queries: it must return one each"
        )


def check_backend(search: object) -> None:
    """Raise `TypeError` for what is no search engine."""
    if not callable(getattr(search, "search_batch", None)):
        raise TypeError(f"search is a {type(search).__name__}, but must have a method `search_batch`")
