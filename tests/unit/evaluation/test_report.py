from __future__ import annotations

import pytest

from sorl_trl.evaluation import mean_measure, split_by_hops
from sorl_trl.types import StopReason

from .trajectories import answered, ended, evaluated, question

ROWS = [
    evaluated(question("Ann Lee", 2), answered("Ann", searches=3)),
    evaluated(question("Ann", 1), answered("ann", searches=1)),
    evaluated(question("Bob", 2), answered("Bob")),
    evaluated(question("Cy", 2), ended(StopReason.MAX_TURNS)),
    evaluated(question("Cy", 3), ended(StopReason.SEARCH_UNAVAILABLE)),
    evaluated(question("Di"), answered("Di")),
]
DOWN = [ROWS[4]]


def test_means_are_over_the_trajectories_that_have_the_measure() -> None:
    assert mean_measure(ROWS, "exact_match") == 3 / 5
    # "Ann" for "Ann Lee": precision 1, recall 1/2.
    assert mean_measure(ROWS, "f1") == pytest.approx((2 / 3 + 1 + 1 + 0 + 1) / 5)
    assert mean_measure(DOWN, "exact_match") is None
    assert mean_measure([], "f1") is None


def test_a_question_that_does_not_say_has_no_number_of_hops() -> None:
    parts = split_by_hops(ROWS)
    assert list(parts) == [1, 2, 3]
    assert parts == {1: [ROWS[1]], 2: [ROWS[0], ROWS[2], ROWS[3]], 3: DOWN}
    assert split_by_hops([ROWS[5]]) == {}
