from __future__ import annotations

import pytest
from tests.unit.search.backends import FakeSearch, found

from sorl_trl.search import RetryPolicy, SearchError, SearchUnavailable

NO_WAIT = RetryPolicy(attempts=3, initial_wait_s=0)
DOWN = SearchUnavailable("down")


def test_an_engine_that_recovers_is_waited_for() -> None:
    backend = FakeSearch([DOWN, ConnectionError("reset")])
    assert NO_WAIT.retrying()(backend.search_batch, ["a", "bc"], 3) == [found("a", 3), found("bc", 3)]
    assert backend.calls == [["a", "bc"]] * 3


@pytest.mark.parametrize(
    ("error", "patient", "attempts"),
    [(DOWN, True, 3), (DOWN, False, 1), (SearchError("refused"), True, 1), (FileNotFoundError("index"), True, 1)],
)
def test_an_engine_that_stays_down_is_given_up_and_a_mistake_is_not_repeated(
    error: Exception, patient: bool, attempts: int
) -> None:
    backend = FakeSearch([error] * 9)
    with pytest.raises(type(error)) as caught:
        NO_WAIT.retrying(patient)(backend.search_batch, ["a"], 3)
    assert caught.value is error
    assert len(backend.calls) == attempts


def test_the_deadline_counts_the_time_of_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts of 20 s under 60 s: the third ends when the time is up."""
    now = [0.0]
    monkeypatch.setattr("tenacity.time.monotonic", lambda: now[0])

    class SlowSearch(FakeSearch):
        def search_batch(self, queries, k):
            now[0] += 20
            return super().search_batch(queries, k)

    backend = SlowSearch([DOWN] * 9)
    policy = RetryPolicy(attempts=9, initial_wait_s=0, max_wait_s=0, deadline_s=60)
    with pytest.raises(SearchUnavailable):
        policy.retrying()(backend.search_batch, ["a"], 3)
    assert len(backend.calls) == 3
