from __future__ import annotations

import json

import pytest

from sorl_trl.evaluation.figures import summarize
from sorl_trl.types import StopReason

from .trajectories import outcome


def test_a_sampled_question_counts_once_by_its_mean() -> None:
    outcomes = [
        *(outcome("ann", score, i, searches=i) for i, score in enumerate([1.0, 0.0, 0.0, 0.0])),
        *(outcome("bob", score, i, searches=4) for i, score in enumerate([1.0, 1.0])),
        outcome("bob", None, 2),
        outcome("bob", None, 3),
        *(outcome("cy", 0.0, i, searches=0) for i in range(4)),
        *(outcome("di", None, i) for i in range(4)),
    ]
    summary = summarize("nq", outcomes)
    assert (summary["questions"], summary["trajectories"], summary["masked"]) == (4, 16, 6)
    assert summary["means"]["exact_match"]["mean"] == pytest.approx((0.25 + 1 + 0) / 3)
    assert summary["means"]["searches"]["mean"] == pytest.approx((1.5 + 4 + 0) / 3)
    best = summary["best_of_n"]
    assert best["exact_match"]["mean"] == best["correct"]["mean"] == pytest.approx(2 / 3)
    assert "searches" not in best
    assert summary["stop_reasons"]["answered"] == 10 / 16
    assert summary["stop_reasons"]["search_unavailable"] == 6 / 16
    assert set(summary["stop_reasons"]) == {reason.value for reason in StopReason}


def test_one_trajectory_each_has_no_best() -> None:
    summary = summarize("nq", [outcome("ann", 1.0), outcome("bob", 0.0)])
    assert summary["best_of_n"] == {}
    assert summary["means"]["exact_match"] == {"mean": 0.5, "low": 0, "high": 1}


def test_what_does_not_apply_has_no_mean() -> None:
    open_questions = summarize("nq", [outcome("ann", 1.0)])
    assert "choice_accuracy" not in open_questions["means"]
    down = summarize("nq", [outcome("ann", None)])
    assert down["means"] == {}
    assert down["masked"] == 1


def test_equal_ids_of_different_questions_are_different_questions() -> None:
    one = outcome("1", 1.0)
    other = {**one, "question": "something else ?", "exact_match": 0.0}
    summary = summarize("own", [one, other])
    assert summary["questions"] == 2
    assert summary["means"]["exact_match"]["mean"] == 0.5


def test_summaries_are_plain_json_without_nan() -> None:
    summary = summarize("nq", [outcome("ann", 1.0), outcome("bob", None), outcome("ann", 0.0, 1)])
    nq = json.loads(json.dumps(summary, allow_nan=False))
    assert nq["means"]["exact_match"] == {"mean": 0.5, "low": 0.5, "high": 0.5}
    assert nq["best_of_n"]["exact_match"]["mean"] == 1
