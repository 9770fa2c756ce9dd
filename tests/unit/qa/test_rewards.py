from __future__ import annotations

import pytest

from sorl_trl.qa import exact_match_reward, f1_reward, format_reward, search_hit_turn_reward
from sorl_trl.types import StopReason

REWARDS = [exact_match_reward, f1_reward, format_reward, search_hit_turn_reward]


def call(reward, trajectories, golden_answers):
    """As TRL calls a reward: by keyword, with all there is."""
    rows = len(trajectories)
    return reward(
        prompts=["?"] * rows,
        completions=["the text of observations too: <answer>Paris</answer>"] * rows,
        completion_ids=[[1]] * rows,
        trajectory=trajectories,
        golden_answers=golden_answers,
        trainer_state=None,
        log_metric=print,
    )


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (exact_match_reward, [1.0, 0.0, None, 0.0]),
        (f1_reward, [1.0, 2 / 3, None, 0.0]),
        (format_reward, [1.0, 0.0, None, 0.0]),
        (search_hit_turn_reward, [[1.0, 0.0], [0.0, 0.0], None, [0.0]]),
    ],
)
def test_rewards_of_a_batch(episode, reward, expected):
    trajectories = [
        episode().search("It is Paris").answer("paris"),
        episode().invalid().answer("Rome Italy"),
        episode().search(None).end(StopReason.SEARCH_UNAVAILABLE),
        episode().search("Rome").end(StopReason.MAX_TURNS),
    ]
    assert call(reward, trajectories, [["Paris"], ["Rome"], ["Paris"], ["Oslo"]]) == expected


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("stop_reason", list(StopReason))
def test_only_an_infrastructure_failure_is_left_out(episode, reward, stop_reason):
    [score] = call(reward, [episode().search("Paris").end(stop_reason)], [["Paris"]])
    assert (score is None) == (stop_reason is StopReason.SEARCH_UNAVAILABLE)


@pytest.mark.parametrize("reward", REWARDS)
def test_an_empty_batch(reward):
    assert call(reward, [], []) == []


@pytest.mark.parametrize("reward", REWARDS)
def test_a_missing_trajectory_column_is_named(reward):
    with pytest.raises(TypeError, match="'trajectory'"):
        reward(prompts=["?"], completions=["!"], golden_answers=[["Paris"]])


@pytest.mark.parametrize("reward", [exact_match_reward, f1_reward, search_hit_turn_reward])
def test_columns_of_different_length_are_an_error(episode, reward):
    with pytest.raises(ValueError, match="shorter"):
        call(reward, [episode().answer("Paris")] * 2, [["Paris"]])
