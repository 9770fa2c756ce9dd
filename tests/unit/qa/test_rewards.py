from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from sorl_trl.qa import (
    REWARDS,
    Question,
    answer_reward,
    build_prompt_rows,
    environment_reward,
    exact_match_reward,
    f1_reward,
)
from sorl_trl.types import Action, ActionKind, Observation, StopReason, Trajectory, Turn
from tests.unit.evaluation.trajectories import answered, ended

SEEN = Observation((2,), "2")
TURNS = (Turn((1,), "", Action(ActionKind.TOOL, "1 + 1", "calculate")), Turn((1,), "", Action(ActionKind.ANSWER, "2")))


def call(reward, trajectories, golden_answers, **columns):
    """As TRL calls a reward: by keyword, with all there is."""
    rows = len(trajectories)
    return reward(
        prompts=["?"] * rows,
        completions=["the text of observations too: <answer>Paris</answer>"] * rows,
        completion_ids=[[1]] * rows,
        trajectory=trajectories,
        golden_answers=golden_answers,
        environments=[SimpleNamespace(solved=True)] * rows,
        **columns,
        trainer_state=None,
        log_metric=print,
    )


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (exact_match_reward, [1.0, 0.0, None, 0.0]),
        (answer_reward, [1.0, 0.0, None, 0.0]),
        (f1_reward, [1.0, 2 / 3, None, 0.0]),
    ],
)
def test_rewards_of_a_batch(reward, expected):
    trajectories = [
        answered("paris", searches=1),
        answered("Rome Italy"),
        ended(StopReason.SEARCH_UNAVAILABLE),
        ended(StopReason.MAX_TURNS),
    ]
    assert call(reward, trajectories, [["Paris"], ["Rome"], ["Paris"], ["Oslo"]]) == expected


@pytest.mark.parametrize("reward", REWARDS.values(), ids=REWARDS)
def test_only_an_infrastructure_failure_is_left_out(reward):
    trajectories = [*map(ended, StopReason)]
    scores = zip(StopReason, call(reward, trajectories, [["Paris"]] * len(trajectories)), strict=True)
    left_out = {stop_reason for stop_reason, score in scores if score is None}
    assert left_out == {StopReason.SEARCH_UNAVAILABLE, StopReason.ENVIRONMENT_UNAVAILABLE, StopReason.NO_CALL}


def test_the_environment_reward_is_what_the_environment_gave_for_each_turn():
    given, nothing = (replace(turn, reward=reward) for turn, reward in zip(TURNS, (0.5, None), strict=True))
    trajectories = [
        Trajectory((0,), (given, SEEN, nothing), StopReason.ANSWERED),
        Trajectory((0,), (nothing, SEEN, replace(given, reward=-1)), StopReason.ENVIRONMENT_DONE),
        Trajectory((0,), (given,), StopReason.ENVIRONMENT_UNAVAILABLE),
        Trajectory((0,), (), StopReason.CONTEXT_LIMIT),
    ]
    assert call(environment_reward, trajectories, [["?"]] * 4) == [[0.5, 0.0], [0.0, -1.0], None, []]


OPEN = Question("1", "Where?", ("Paris",), data_source="nq")
CHOICE = Question("2", "Which?", ("Rome",), options={"A": "Oslo", "B": "Rome"}, data_source="medqa")


def columns(*questions):
    """The columns of a training set as a batch has them."""
    rows = build_prompt_rows(questions)
    return {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "golden_answers")}


def test_answer_reward_of_a_mixed_set():
    trajectories = [*map(answered, ("B", "B", "paris", "rome"))]
    golden_answers = [["Paris"], ["Rome"], ["Paris"], ["Rome"]]
    scores = call(answer_reward, trajectories, golden_answers, **columns(OPEN, CHOICE, OPEN, CHOICE))
    assert scores == [0.0, 1.0, 1.0, 1.0]
    joined = [None, [["A", "Oslo"], ["B", "Rome"]]]  # data sets with and without the column
    assert call(answer_reward, trajectories[2:], [["Paris"], ["Rome"]], options=joined) == [1.0, 1.0]
