from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch

from sorl_trl.trainers.turns.rewards import TurnRewardRecorder


def record(returned: list[Any], counts: list[int]) -> tuple[TurnRewardRecorder, list[float | None]]:
    recorder = TurnRewardRecorder(counts)
    return recorder, recorder.wrap(lambda **_: returned, 0, "hits")()


def test_trl_sees_the_sum_and_the_turns_are_kept() -> None:
    recorder, totals = record([[1.0, 0.5], 0.25, None], [2, 3, 1])
    assert totals == [1.5, 0.25, None]
    per_func = torch.tensor([[1.5], [0.25], [math.nan]])
    combined = recorder.combine(per_func, torch.tensor([2.0]))
    # Turn rewards stay where they are; an outcome stands on the last turn; nothing is given where nothing was scored.
    assert combined.tolist() == [[2.0, 1.0, 0.0], [0.0, 0.0, 0.5], [0.0, 0.0, 0.0]]
    assert recorder.has_turn_rewards


def test_functions_are_summed_with_their_weights() -> None:
    recorder = TurnRewardRecorder([2])
    recorder.wrap(lambda **_: [[1.0, 2.0]], 0, "turns")()
    recorder.wrap(lambda **_: [10.0], 1, "outcome")()
    combined = recorder.combine(torch.tensor([[3.0, 10.0]]), torch.tensor([1.0, 0.5]))
    assert combined.tolist() == [[1.0, 7.0]]


def test_outcome_rewards_only() -> None:
    recorder, totals = record([1.0, 0.0], [1, 2])
    assert totals == [1.0, 0.0]
    assert not recorder.has_turn_rewards


@pytest.mark.parametrize("reward", [torch.tensor([1.0, 2.0]), (1.0, 2.0), [1, 2]])
def test_any_sequence_will_do(reward: Any) -> None:
    _, totals = record([reward], [2])
    assert totals == [3.0]


def test_a_scalar_tensor_is_an_outcome() -> None:
    recorder, totals = record([torch.tensor(0.5)], [2])
    assert not recorder.has_turn_rewards
    assert float(totals[0]) == 0.5


@pytest.mark.parametrize("returned", [[1.0], [1.0, 2.0, 3.0]])
def test_ragged_turn_rewards_are_named(returned: list[float]) -> None:
    with pytest.raises(ValueError, match=rf"'hits' returned {len(returned)} turn rewards for trajectory 0.* 2 turns"):
        record([returned], [2])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_turn_rewards_must_be_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        record([[1.0, bad]], [2])


def test_a_trajectory_without_a_turn_has_nowhere_to_put_a_reward() -> None:
    recorder, totals = record([[], 1.0], [0, 0])
    assert totals == [None, 1.0]
    assert recorder.combine(torch.tensor([[math.nan], [1.0]]), torch.ones(1)).shape == (2, 0)


def test_async_functions_stay_async() -> None:
    async def hits(**_: Any) -> list[list[float]]:
        return [[1.0, 2.0]]

    recorder = TurnRewardRecorder([2])
    wrapped = recorder.wrap(hits, 0, "hits")
    assert asyncio.run(wrapped()) == [3.0]
    assert recorder.has_turn_rewards


def test_reward_models_pass_through() -> None:
    model = torch.nn.Linear(1, 1)
    assert TurnRewardRecorder([1]).wrap(model, 0, "model") is model
