from __future__ import annotations

import pytest

from sorl_trl.evaluation import EvaluationResult, format_report
from sorl_trl.types import StopReason

from .trajectories import answered, ended, question


def test_one_aligned_line_per_result_with_a_dash_for_what_is_missing():
    both = EvaluationResult(
        (question("Ann", 1), question("Ann Lee", 2)), (answered("Ann", searches=1), answered("Ann", searches=2))
    )
    down = EvaluationResult((question("Ann", 1),), (ended(StopReason.SEARCH_UNAVAILABLE),))
    assert format_report({"greedy": both, "engine down": down}).splitlines() == [
        "             questions     EM     F1  EM 1-hop  EM 2-hop  searches  answered",
        "----------------------------------------------------------------------------",
        "greedy               2  0.500  0.833     1.000     0.000     1.500     1.000",
        "engine down          1      -      -         -         -     0.000     0.000",
    ]


def test_questions_without_hops_get_no_column_of_hops():
    table = format_report({"greedy": EvaluationResult((question("Ann"),), (answered("Ann"),))})
    assert "hop" not in table


def test_nothing_to_report_is_refused():
    with pytest.raises(ValueError, match="results is empty"):
        format_report({})
