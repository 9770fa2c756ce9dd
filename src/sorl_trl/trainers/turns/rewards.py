"""Reward functions that return one float per turn, where TRL's return one float per completion."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer.utils import is_async_callable

TURN_IDS = "turn_ids"
"""A parameter that a reward function may name. It then gets the turn of each token, for each completion, unless the
dataset has a column of this name, which TRL passes."""


@dataclass(frozen=True)
class SplitRewards:
    """The rewards of B trajectories of at most K turns, with turn rewards and outcomes apart."""

    turn_rewards: Tensor
    """(B, K) the weighted sum of the turn rewards, 0 where there is none."""
    has_turn_reward: Tensor
    """(B, K) bool."""
    outcomes: Tensor
    """(B,) the weighted sum of the outcome rewards, 0 where there is none."""
    has_outcome: Tensor
    """(B,) bool."""


class TurnRewards:
    """Keeps the turn rewards of a rollout. TRL sees only their sum per completion.

    For each completion, a reward function may return a float (an outcome reward), a sequence with one float per turn
    (None for a turn that has none), or `None` (not scored by this function), in any mixture. NaN is `None`, as in TRL;
    a trajectory with an infinite reward is not scored at all.
    """

    def __init__(self) -> None:
        self._turn_ids: list[list[int]] = []
        self._turn_counts: list[int] = []
        self._recorded: dict[tuple[int, int], list[float | None]] = {}

    def begin(self, turn_ids: Sequence[Sequence[int]], turn_counts: Sequence[int]) -> None:
        """Forget all records, and expect rewards for trajectories with these turns."""
        self._turn_ids, self._turn_counts = [list(row) for row in turn_ids], list(turn_counts)
        self._recorded = {}

    def recording(self, reward_func: Any, index: int, name: str) -> Any:
        """Wrap reward function number `index` to record its turn rewards. A reward model is returned as it is."""
        if isinstance(reward_func, nn.Module):
            return reward_func
        takes_turns = _takes_turns(reward_func)

        def given(arguments: dict[str, Any]) -> dict[str, Any]:
            return {TURN_IDS: self._turn_ids, **arguments} if takes_turns else arguments

        if is_async_callable(reward_func):

            @wraps(reward_func, updated=())
            async def recorded_async(**arguments: Any) -> list[Any]:
                return self._record(await reward_func(**given(arguments)), index, name)

            return recorded_async

        @wraps(reward_func, updated=())
        def recorded(**arguments: Any) -> list[Any]:
            return self._record(reward_func(**given(arguments)), index, name)

        return recorded

    def _record(self, returned: Iterable[Any], index: int, name: str) -> list[Any]:
        """Keep the turn rewards of one function, and return one number (or `None`) per completion for TRL."""
        if not isinstance(returned, Iterable):
            raise ValueError(
                f"The reward function {name!r} returned {returned!r}, but must return a list with one reward for each "
                f"of {len(self._turn_counts)} completions."
            )
        rewards = list(returned)
        if len(rewards) != len(self._turn_counts):
            return rewards  # TRL raises, and names the function and both counts
        return [self._record_one(reward, row, index, name) for row, reward in enumerate(rewards)]

    def _record_one(self, reward: Any, row: int, index: int, name: str) -> Any:
        reward = reward.tolist() if hasattr(reward, "tolist") else reward  # tensors and arrays
        if reward is None or _is_number(reward):
            return reward
        is_list = isinstance(reward, Sequence) and not isinstance(reward, (str, bytes))
        if not (is_list and all(each is None or _is_number(each) for each in reward)):
            raise ValueError(
                f"The reward function {name!r} returned {reward!r} for trajectory {row}. A reward is a number, a list "
                "with one number per turn, or None."
            )
        if self._turn_counts[row] == 0:
            return None  # masked out of the loss, even if the function saw generated turns
        turn_rewards = [None if each is None or math.isnan(each) else float(each) for each in reward]
        self._check_count(turn_rewards, row, name)
        given = [each for each in turn_rewards if each is not None]
        if not given:
            return None
        if torch.tensor(given).isinf().any():
            return math.inf  # `RolloutRecorder.note_rewards` leaves the trajectory out
        self._recorded[row, index] = turn_rewards
        return math.fsum(given)

    def _check_count(self, turn_rewards: list[float | None], row: int, name: str) -> None:
        if len(turn_rewards) != self._turn_counts[row]:
            raise ValueError(
                f"The reward function {name!r} returned {len(turn_rewards)} turn rewards for trajectory {row}, which "
                f"has {self._turn_counts[row]} turns (as in `turn_ids`). Return one float per turn, one for the "
                "trajectory, or None."
            )

    def split(self, rewards_per_func: Tensor, weights: Tensor) -> SplitRewards:
        """Split turn rewards from outcomes, each as the weighted sum over all functions.

        Args:
            rewards_per_func: (B, F) of the local trajectories, NaN where a function gave none.
            weights: (F,).
        """
        table = rewards_per_func.new_full(
            (len(self._turn_counts), max([0, *self._turn_counts]), len(weights)), torch.nan
        )
        outcomes = rewards_per_func.clone()
        outcomes[[row for row, count in enumerate(self._turn_counts) if count == 0]] = torch.nan
        for (row, index), rewards in self._recorded.items():
            given = [math.nan if each is None else each for each in rewards]
            table[row, : len(given), index] = table.new_tensor(given)
            outcomes[row, index] = torch.nan
        return SplitRewards(
            turn_rewards=(table * weights).nansum(-1),
            has_turn_reward=~table.isnan().all(-1),
            outcomes=(outcomes * weights).nansum(-1),
            has_outcome=~outcomes.isnan().all(-1),
        )


def _takes_turns(reward_func: Callable[..., Any]) -> bool:
    try:
        return TURN_IDS in inspect.signature(reward_func).parameters
    except (TypeError, ValueError):  # for example, a function in C
        return False


def _is_number(reward: Any) -> bool:
    """Whether TRL takes it for a number: not if it is a string of digits."""
    return hasattr(reward, "__float__")
