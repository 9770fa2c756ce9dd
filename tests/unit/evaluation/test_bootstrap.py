from __future__ import annotations

import numpy as np
import pytest

from sorl_trl.evaluation.figures import RESAMPLES, Floats, bootstrap, figure, p_value


def estimate(values: list[float], stream: str = "nq") -> tuple[float, Floats]:
    return bootstrap({"score": np.array(values)}, stream)["score"]


def p_of(values: list[float]) -> float:
    return p_value(estimate(values)[1])


def test_two_questions_are_drawn_in_four_equally_likely_ways() -> None:
    mean, resampled = estimate([0.0, 1.0])
    assert set(resampled) == {0.0, 0.5, 1.0}
    for each, share in ((0.0, 0.25), (0.5, 0.5), (1.0, 0.25)):
        assert (resampled == each).mean() == pytest.approx(share, abs=0.02)
    assert figure(mean, resampled) == {"mean": 0.5, "low": 0.0, "high": 1.0}


def test_the_interval_is_that_of_the_normal_distribution_for_many_questions() -> None:
    many = figure(*estimate([0.0] * 300 + [1.0] * 100))
    half_width = 1.96 * (0.25 * 0.75 / 400) ** 0.5
    assert many["mean"] == 0.25
    assert (many["low"], many["high"]) == pytest.approx((0.25 - half_width, 0.25 + half_width), abs=0.005)


def test_p_is_one_without_a_difference_and_least_where_no_resample_is_on_the_other_side() -> None:
    assert p_of([0.0, 0.0, 0.0]) == 1
    assert p_of([-1.0, 1.0]) == 1
    assert p_of([1.0, 2.0]) == pytest.approx(2 / (RESAMPLES + 1))
    # One in eight draws of three takes the two zeros' side only: 2 * (2/3)^3.
    assert p_of([0.0, 0.0, 1.0]) == pytest.approx(2 * (2 / 3) ** 3, abs=0.03)


def test_a_column_is_averaged_over_the_questions_that_have_it() -> None:
    nan = float("nan")
    columns = {"all": np.array([1.0, 2.0, 6.0]), "some": np.array([nan, 2.0, nan]), "none": np.full(3, nan)}
    estimates = bootstrap(columns, "mixed")
    assert set(estimates) == {"all", "some"}
    assert estimates["all"][0] == 3
    assert figure(*estimates["some"]) == {"mean": 2, "low": 2, "high": 2}
    assert np.isnan(estimates["some"][1]).mean() == pytest.approx((2 / 3) ** 3, abs=0.02)


def test_streams_are_independent_and_repeatable() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert (estimate(values)[1] == estimate(values)[1]).all()
    correlation = np.corrcoef(estimate(values, "nq")[1], estimate(values, "popqa")[1])[0, 1]
    assert abs(correlation) < 0.05
