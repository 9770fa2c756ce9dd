"""Reward functions that return one float per turn, beside TRL's one float per completion."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer.utils import is_async_callable

TURN_IDS = "turn_ids"
"""What reward functions get beside TRL's arguments: of each completion, the turn of each token."""


@dataclass(frozen=True)
class RewardKinds:
    """What B trajectories of at most K turns earned, turn rewards and outcomes apart."""

    of_turns: Tensor
    """(B, K) the weighted sum of the turn rewards."""
    has_turn_reward: Tensor
    """(B, K) bool, whether there is any."""
    outcomes: Tensor
    """(B, K) the weighted sum of the outcome rewards, on the last turn."""
    has_outcome: Tensor
    """(B, K) bool, whether there is any: at most on the last turn."""

    @property
    def pairs(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Rewards and mask of each kind."""
        return (self.of_turns, self.has_turn_reward), (self.outcomes, self.has_outcome)

    def with_gains(self, gains: Tensor, has_gain: Tensor) -> RewardKinds:
        """These with `gains` (B, K), 0 where `has_gain` is not set, among the turn rewards."""
        return replace(self, of_turns=self.of_turns + gains, has_turn_reward=self.has_turn_reward | has_gain)


class TurnRewardRecorder:
    """Records the turn rewards of one batch, while TRL sees their sum per completion.

    A reward function may return for each completion a float (an outcome reward), a sequence with one float per turn,
    or `None` (not scored by this function), in any mixture.

    Args:
        turn_counts: number of turns of each of the B local trajectories.
    """

    def __init__(self, turn_counts: Sequence[int]) -> None:
        self._turn_counts = list(turn_counts)
        self._recorded: dict[tuple[int, int], list[float]] = {}

    @property
    def has_turn_rewards(self) -> bool:
        """Whether some function returned turn rewards for some trajectory."""
        return bool(self._recorded)

    def wrap(self, reward_func: Any, index: int, name: str) -> Any:
        """Reward function number `index`, recorded. A reward model scores whole completions: it is returned as is."""
        if isinstance(reward_func, nn.Module):
            return reward_func
        call = _called_as_by_trl(reward_func)
        if is_async_callable(reward_func):
            return self._wrap_async(call, index, name)

        def recorded(**kwargs: Any) -> list[Any]:
            return self._record(call(**kwargs), index, name)

        return recorded

    def _wrap_async(self, call: Callable[..., Any], index: int, name: str) -> Callable[..., Any]:
        async def recorded(**kwargs: Any) -> list[Any]:
            return self._record(await call(**kwargs), index, name)

        return recorded

    def _record(self, returned: Iterable[Any], index: int, name: str) -> list[Any]:
        """Keep the turn rewards of one function and give TRL one number (or `None`) per completion."""
        rewards = list(returned)
        if len(rewards) != len(self._turn_counts):
            return rewards  # TRL raises, and names the function and both counts
        return [self._record_one(reward, row, index, name) for row, reward in enumerate(rewards)]

    def _record_one(self, reward: Any, row: int, index: int, name: str) -> Any:
        reward = reward.tolist() if hasattr(reward, "tolist") else reward  # tensors and arrays
        if reward is None or _is_number(reward):
            return reward
        is_list = isinstance(reward, Sequence) and not isinstance(reward, (str, bytes))
        if not (is_list and all(map(_is_number, reward))):
            raise ValueError(
                f"The reward function {name!r} returned {reward!r} for trajectory {row}. A reward is a number, a list "
                "with one number per turn, or None."
            )
        if self._turn_counts[row] == 0:
            return None  # masked out of the loss, though the function may have seen generated turns
        turn_rewards = list(map(float, reward))
        self._check(turn_rewards, row, name)
        self._recorded[row, index] = turn_rewards
        return math.fsum(turn_rewards)

    def _check(self, turn_rewards: list[float], row: int, name: str) -> None:
        if len(turn_rewards) != self._turn_counts[row]:
            raise ValueError(
                f"The reward function {name!r} returned {len(turn_rewards)} turn rewards for trajectory {row}, which "
                f"has {self._turn_counts[row]} turns (as in `turn_ids`, after `turn_boundary`). "
                "Return one float per turn, one for the trajectory, or None."
            )
        if not all(map(math.isfinite, turn_rewards)):
            raise ValueError(
                f"The reward function {name!r} returned {turn_rewards} for trajectory {row}. Turn rewards must be "
                "finite; return None to leave the trajectory unscored."
            )

    def combine(self, rewards_per_func: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of all functions, per turn.

        Args:
            rewards_per_func: (B, F) of the local trajectories, NaN where a function gave none.
            weights: (F,).

        Returns:
            (B, K) turn rewards, K = largest number of turns; an outcome reward stands on the last turn. A trajectory
            without a turn has nowhere to put a reward: its row is 0.
        """
        outcomes, weight_of = rewards_per_func.tolist(), weights.tolist()
        combined = [[0.0] * max([0, *self._turn_counts]) for _ in self._turn_counts]
        for row, turns in enumerate(self._turn_counts):
            for index, weight in enumerate(weight_of):
                recorded = self._recorded.get((row, index))
                if recorded is not None:
                    for turn, reward in enumerate(recorded):
                        combined[row][turn] += weight * reward
                elif turns and not math.isnan(outcomes[row][index]):
                    combined[row][turns - 1] += weight * outcomes[row][index]
        shape = len(combined), max([0, *self._turn_counts])
        return rewards_per_func.new_tensor(combined).reshape(shape)

    def kinds(self, rewards_per_func: Tensor, weights: Tensor) -> RewardKinds:
        """The same with turn rewards and outcomes apart."""
        per_func, weight_of = rewards_per_func.tolist(), weights.tolist()
        shape = len(self._turn_counts), max([0, *self._turn_counts])
        of_turns, has_turn_reward, outcomes, has_outcome = (torch.zeros(shape, dtype=torch.float64) for _ in range(4))
        for row, turns in enumerate(self._turn_counts):
            for index, weight in enumerate(weight_of):
                recorded = self._recorded.get((row, index))
                if recorded is not None:
                    of_turns[row, :turns] += weight * torch.tensor(recorded, dtype=torch.float64)
                    has_turn_reward[row, :turns] = 1
                elif turns and not math.isnan(per_func[row][index]):
                    outcomes[row, turns - 1] += weight * per_func[row][index]
                    has_outcome[row, turns - 1] = 1
        return RewardKinds(
            of_turns.to(rewards_per_func), has_turn_reward.to(rewards_per_func.device).bool(),
            outcomes.to(rewards_per_func), has_outcome.to(rewards_per_func.device).bool(),
        )  # fmt: skip


def _called_as_by_trl(reward_func: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is not given `turn_ids` where TRL's own arguments are all that it takes."""
    if _takes_turn_ids(reward_func):
        return reward_func

    def call(**kwargs: Any) -> Any:
        kwargs.pop(TURN_IDS, None)
        return reward_func(**kwargs)

    return call


def _takes_turn_ids(reward_func: Callable[..., Any]) -> bool:
    if isinstance(reward_func, partial) and TURN_IDS in reward_func.keywords:
        return False  # bound already: what the user has given stays
    try:
        parameters = inspect.signature(reward_func).parameters
    except (TypeError, ValueError):  # written in C, perhaps: it is called as ever
        return True
    named = parameters.get(TURN_IDS)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_any or (named is not None and named.kind in by_name)


def _is_number(reward: Any) -> bool:
    """Whether it is one for TRL: a string of digits is not."""
    return hasattr(reward, "__float__")
