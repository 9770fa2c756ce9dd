"""How far means over windows of tokens move, on numbers whose law is known."""

from __future__ import annotations

import math
import random

import pytest
from benchmarks.ratio_spread import KEPT, format_table, reach, slope, window_means


def test_windows_do_not_overlap_and_a_rest_is_left_out() -> None:
    assert window_means([[1.0, 3.0, 5.0, 7.0, 100.0], [2.0]], 2) == [2.0, 6.0]


def test_reach_is_kept_by_nine_in_ten() -> None:
    assert KEPT == 0.9
    assert reach([0.1 * i * (-1) ** i for i in range(1, 11)]) == pytest.approx(0.9)


def test_independent_tokens_move_a_mean_by_the_square_root_and_common_moves_not_at_all() -> None:
    draw = random.Random(0)
    alone = [[draw.gauss(0, 0.1) for _ in range(256)] for _ in range(400)]
    together = [[shift] * 256 for shift in (draw.gauss(0, 0.1) for _ in range(400))]
    windows = (1, 2, 4, 8, 16, 32)
    slopes = [slope({n: reach(window_means(rows, n)) for n in windows}) for rows in (alone, together)]
    assert None not in slopes
    assert slopes[0] == pytest.approx(-0.5, abs=0.03)
    assert slopes[1] == pytest.approx(0.0, abs=1e-9)


def test_slope_is_that_of_the_logarithms() -> None:
    assert slope({n: 3 / n for n in (1, 10, 100)}) == pytest.approx(-1)
    assert slope({n: 2 / math.sqrt(n) for n in (1, 10, 100)}) == pytest.approx(-0.5)


@pytest.mark.parametrize("points", [{}, {1: 0.1}, {1: 0.1, 2: 0.0}])
def test_no_line_goes_through_one_point_or_through_0(points) -> None:
    assert slope(points) is None


ROW = {
    "regime": "reuse",
    "learning_rate": 1e-4,
    "updates": [2, 8],
    "reach": {"1": 0.2, "4": 0.1},
    "p": 0.5,
    "mean_log_ratio": -0.01,
}


def test_a_row_of_the_table() -> None:
    assert format_table([ROW]).splitlines()[-1] == "| reuse | 0.0001 | 2 to 8 | 0.2 | 0.1 | **0.50** | -0.01 |"


def test_what_was_not_measured_is_a_dash() -> None:
    empty = ROW | {"reach": {}, "p": None, "mean_log_ratio": None}
    assert format_table([ROW, empty]).splitlines()[-1] == "| reuse | 0.0001 | 2 to 8 |  |  | – | – |"
