from __future__ import annotations

import numpy as np
import pytest

from sorl_trl.evaluation.bootstrap import RESAMPLES, Estimate, bootstrap


def estimate(values: list[float], stream: str = "nq") -> Estimate:
    return bootstrap({"score": np.array(values)}, stream)["score"]


def test_two_questions_are_drawn_in_four_equally_likely_ways() -> None:
    both = estimate([0.0, 1.0])
    assert both.mean == 0.5
    assert set(both.resampled) == {0.0, 0.5, 1.0}
    for mean, share in ((0.0, 0.25), (0.5, 0.5), (1.0, 0.25)):
        assert (both.resampled == mean).mean() == pytest.approx(share, abs=0.02)
    assert both.interval == (0.0, 1.0)


def test_the_interval_is_that_of_the_normal_distribution_for_many_questions() -> None:
    many = estimate([0.0] * 300 + [1.0] * 100)
    half_width = 1.96 * (0.25 * 0.75 / 400) ** 0.5
    assert many.mean == 0.25
    assert many.interval == pytest.approx((0.25 - half_width, 0.25 + half_width), abs=0.005)


def test_p_is_one_without_a_difference_and_least_where_no_resample_is_on_the_other_side() -> None:
    assert estimate([0.0, 0.0, 0.0]).p_value == 1
    assert estimate([-1.0, 1.0]).p_value == 1
    assert estimate([1.0, 2.0]).p_value == pytest.approx(2 / (RESAMPLES + 1))
    # One in eight draws of three takes the two zeros' side only: 2 * (2/3)^3.
    assert estimate([0.0, 0.0, 1.0]).p_value == pytest.approx(2 * (2 / 3) ** 3, abs=0.03)


def test_a_column_is_averaged_over_the_questions_that_have_it() -> None:
    nan = float("nan")
    columns = {"all": np.array([1.0, 2.0, 6.0]), "some": np.array([nan, 2.0, nan]), "none": np.full(3, nan)}
    estimates = bootstrap(columns, "mixed")
    assert set(estimates) == {"all", "some"}
    assert estimates["all"].mean == 3
    assert estimates["some"].interval == (2, 2)
    assert np.isnan(estimates["some"].resampled).mean() == pytest.approx((2 / 3) ** 3, abs=0.02)


def test_streams_are_independent_and_repeatable() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert (estimate(values).resampled == estimate(values).resampled).all()
    correlation = np.corrcoef(estimate(values, "nq").resampled, estimate(values, "popqa").resampled)[0, 1]
    assert abs(correlation) < 0.05
