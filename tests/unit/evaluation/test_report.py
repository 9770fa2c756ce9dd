from __future__ import annotations

import pytest

from sorl_trl.evaluation import format_trajectory, mean_measure, split_by_hops
from sorl_trl.qa import Question
from sorl_trl.types import Action, ActionKind, Observation, StopReason, Trajectory, Turn

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


def test_every_segment_has_its_line() -> None:
    search = Turn((1,), "<search> who </search>", Action(ActionKind.SEARCH, "who"))
    observation = Observation((2,), "\n\n<information>\x1b[2JAda\n\u202eByron</information>\n")
    answer = Turn((3,), "<answer> Ada </answer>", Action(ActionKind.ANSWER, "Ada"))
    trajectory = Trajectory((0,), (search, observation, answer), StopReason.ANSWERED)
    assert format_trajectory(question("Ada"), trajectory).splitlines() == [
        "Question     who ?",
        "Policy       <search> who </search>",
        "Environment  <information>\ufffd[2JAda \ufffdByron</information>",
        "Policy       <answer> Ada </answer>",
        "Verdict      right (gold: Ada; stopped: answered)",
    ]
    assert "wrong (gold: Bob" in format_trajectory(question("Bob"), trajectory)


@pytest.mark.parametrize(("answer", "verdict"), [("B", "right"), ("Bob", "right"), ("A", "wrong")])
def test_of_a_multiple_choice_question_the_choice_counts(answer: str, verdict: str) -> None:
    asked = Question("q", "who ?", ("Bob",), options={"A": "Ann", "B": "Bob"})
    last_line = format_trajectory(asked, answered(answer)).splitlines()[-1]
    assert last_line == f"Verdict      {verdict} (gold: Bob; stopped: answered)"
