"""Reward functions that return one float per turn, beside TRL's one float per completion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer.utils import is_async_callable


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
        if is_async_callable(reward_func):
            return self._wrap_async(reward_func, index, name)

        def recorded(**kwargs: Any) -> list[float | None]:
            return self._record(reward_func(**kwargs), index, name)

        return recorded

    def _wrap_async(self, reward_func: Callable[..., Any], index: int, name: str) -> Callable[..., Any]:
        async def recorded(**kwargs: Any) -> list[float | None]:
            return self._record(await reward_func(**kwargs), index, name)

        return recorded

    def _record(self, rewards: Sequence[Any], index: int, name: str) -> list[float | None]:
        """Keep the turn rewards of one function and give TRL one float (or `None`) per completion."""
        if len(rewards) != len(self._turn_counts):
            return list(rewards)  # TRL raises, and names the function and both counts
        totals: list[float | None] = []
        for row, reward in enumerate(rewards):
            reward = reward.tolist() if hasattr(reward, "tolist") else reward  # tensors and arrays
            if reward is None or not hasattr(reward, "__len__"):
                totals.append(reward)
            elif self._turn_counts[row] == 0:
                totals.append(None)  # masked out of the loss, though the function may have seen generated turns
            else:
                turn_rewards = [float(r) for r in reward]
                self._check(turn_rewards, row, name)
                self._recorded[row, index] = turn_rewards
                totals.append(math.fsum(turn_rewards))
        return totals

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
        combined = rewards_per_func.new_zeros(len(self._turn_counts), max([0, *self._turn_counts]))
        for row, turns in enumerate(self._turn_counts):
            for index, weight in enumerate(weights.tolist()):
                recorded = self._recorded.get((row, index))
                outcome = rewards_per_func[row, index].item()
                if recorded is not None:
                    combined[row, :turns] += weight * torch.tensor(recorded, device=combined.device)
                elif turns and not math.isnan(outcome):
                    combined[row, turns - 1] += weight * outcome
        return combined
