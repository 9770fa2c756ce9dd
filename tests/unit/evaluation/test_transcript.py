from __future__ import annotations

import pytest

from sorl_trl.evaluation import format_trajectory
from sorl_trl.qa import Question
from sorl_trl.types import Action, ActionKind, Observation, StopReason, Trajectory, Turn

from .trajectories import answered, question


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
