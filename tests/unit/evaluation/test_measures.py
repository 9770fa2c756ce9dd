from __future__ import annotations

from sorl_trl.evaluation.batches import measure
from sorl_trl.qa import Question
from sorl_trl.records.evaluated import MEASURES
from sorl_trl.types import Action, ActionKind, Observation, StopReason, Trajectory, Turn

from .trajectories import answered, ended, question

CHOICE = Question("q", "which ?", ("Ann Lee",), options={"A": "Bob", "B": "Ann Lee"})


def test_an_open_question_has_no_choice_accuracy() -> None:
    assert measure(question("Ann Lee"), answered("the Ann", searches=2)) == {
        "correct": 0.0,
        "exact_match": 0.0,
        "f1": 2 / 3,
        "sub_exact_match": 0.0,
        "choice_accuracy": None,
        "searches": 2.0,
        "turns": 3.0,
        "invalid_actions": 0.0,
        "neutralized": 0.0,
        "generated_tokens": 3.0,
        "observation_tokens": 2.0,
    }


def test_a_letter_is_correct_where_there_are_options() -> None:
    scores = measure(CHOICE, answered("(B)"))
    assert (scores["correct"], scores["choice_accuracy"], scores["exact_match"]) == (1, 1, 0)


def test_tokens_of_both_sides_and_invalid_actions_are_counted() -> None:
    invalid = Turn((1, 2, 3), "hm", Action(ActionKind.INVALID))
    segments = (invalid, Observation((4, 5), "no"), Turn((6,), "", Action(ActionKind.SEARCH, "last")))
    counts = measure(question("Ann"), Trajectory((0,), segments, StopReason.MAX_TURNS))
    assert [counts[name] for name in ("searches", "turns", "invalid_actions")] == [0, 2, 1]
    assert (counts["generated_tokens"], counts["observation_tokens"]) == (4, 2)


def test_a_task_is_right_where_its_environment_says_so() -> None:
    scores = measure(question("Ann"), answered("Ann"), {"solved": 0.5})
    assert (scores["correct"], scores["exact_match"], scores["searches"], scores["turns"]) == (0.5, None, None, 1.0)


def test_an_infrastructure_failure_measures_nothing() -> None:
    assert measure(CHOICE, ended(StopReason.SEARCH_UNAVAILABLE)) == dict.fromkeys(MEASURES)
