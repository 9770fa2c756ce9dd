from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl.trainers.rewards import SAMPLES, rewarding_turns, split_rewards
from sorl_trl.trainers.samples import Sample
from sorl_trl.types import Action, ActionKind, StopReason, Trajectory, Turn


def samples(counts: Sequence[int]) -> list[Sample]:
    turn = Turn((7,), "", Action(ActionKind.MESSAGE))
    return [Sample(Trajectory((5,), (turn,) * count, StopReason.MAX_TURNS), {}, 0, "", "") for count in counts]


def record(returned: list[Any], counts: list[int]) -> tuple[list[Sample], list[float | None]]:
    made = samples(counts)
    return made, rewarding_turns(lambda **_: returned, 0, "hits")(**{SAMPLES: made})


def split(sampled: list[Sample], rewards: Tensor, weights: Tensor) -> Any:
    longest = max(len(each.trajectory.spans) for each in sampled)
    return SimpleNamespace(**split_rewards(sampled, rewards, weights, longest))


def test_trl_has_nothing_to_say_of_a_trajectory_without_a_turn() -> None:
    """Which is masked out in any case: it prints all that functions were given where none returns a number."""
    assert record([None, None], [0, 1])[1] == [0.0, None]


@pytest.mark.parametrize("none", [None, math.nan])
def test_a_turn_may_have_none(none: float | None) -> None:
    sampled, totals = record([[none, 0.5], [none, none]], [2, 2])
    assert totals == [0.5, None]
    parts = split(sampled, torch.tensor([[0.5], [math.nan]]), torch.ones(1))
    assert parts.has_turn_reward.tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize("rewards", [[math.inf, 0.0], [math.inf, -math.inf], [-math.inf, math.nan], [1e300, -1e300]])
def test_a_trajectory_with_an_infinite_turn_reward_has_no_others(rewards: list[float]) -> None:
    sampled, totals = record([rewards, 0.25], [2, 2])
    assert math.isinf(totals[0] or 0.0) and totals[1] == 0.25
    parts = split(sampled, torch.tensor([[math.nan], [0.25]]), torch.ones(1))
    assert not parts.turn_rewards.any() and not parts.has_turn_reward.any()


def test_a_missing_column_is_named_with_those_there_are() -> None:
    def right(completions: Any, answer: Any, *, level: int = 0, **_: Any) -> list[float]:
        return [1.0]

    given = {SAMPLES: samples([1]), "completions": ["a"], "prompts": ["b"], "log_extra": None, "gold": ["a"]}
    with pytest.raises(ValueError, match=r"'right' needs `answer`, but the columns are \['gold'\]"):
        rewarding_turns(right, 0, "right")(**given)
    assert rewarding_turns(right, 0, "right")(**given, answer=["a"]) == [1.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned None, but must return a list"),  # a `return` that was forgotten, most of all
        (1.0, "returned 1.0, but must return a list"),
        *(([1.0, odd], "A reward is a number") for odd in ("1.0", {"a": 1.0}, ["1.0"])),
        ([1.0, [1.0] * 9], "returned 9 turn rewards for trajectory 1"),
    ],
)
def test_what_is_no_reward_is_named(returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"'hits' .*{message}"):
        record(returned, [1, 1])
