"""Computes advantages and returns from rewards and the critic's values, by turn or by token, and their metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sorl_trl.ops import (
    explained_variance,
    gae,
    turn_broadcast,
    turn_mask,
    turn_reduce,
    turn_rewards_to_tokens,
    turn_starts,
)


@dataclass(frozen=True)
class Experience:
    """What GAE says of each unit of B trajectories, (B, U): of each turn if `per_turn`, else of each token."""

    values: Tensor
    """V of the state in which the unit starts, before any update."""
    advantages: Tensor
    """Not whitened."""
    returns: Tensor
    """The critic's targets, Â + V."""
    rewards_to_go: Tensor
    """Discounted sum of the rewards from here on."""
    unit_turns: Tensor
    """int64, the turn that a unit is or belongs to; -1 where there is no unit."""
    per_turn: bool

    def on_tokens(self, units: Tensor, turn_ids: Tensor) -> Tensor:
        """(B, U) to (B, T): each token gets the value of its turn."""
        return turn_broadcast(units, turn_ids) if self.per_turn else units


def turn_experience(
    turn_rewards: Tensor, token_rewards: Tensor, values: Tensor, turn_ids: Tensor, gamma: float, gae_lambda: float
) -> Experience:
    """GAE with a turn as the time step (docs/paper_to_code.md).

    Args:
        turn_rewards: (B, K).
        token_rewards: (B, T), whose sum over each turn is added to `turn_rewards`.
        values: (B, T), V of the state before each token; V(s_k) is read at the first token of turn k.
        turn_ids: (B, T).
        gamma, gae_lambda: The discount per turn, and λ.
    """
    rewards = turn_rewards + turn_reduce(token_rewards, turn_ids, "sum")
    turn_values = turn_reduce(torch.where(turn_starts(turn_ids), values, 0.0), turn_ids, "sum")
    unit_turns = torch.where(turn_mask(turn_ids), torch.arange(rewards.size(1), device=rewards.device), -1)
    return _experience(rewards, turn_values, unit_turns, gamma, gae_lambda, per_turn=True)


def token_experience(
    turn_rewards: Tensor, token_rewards: Tensor, values: Tensor, turn_ids: Tensor, gamma: float, gae_lambda: float
) -> Experience:
    """GAE over the policy's tokens, skipping observations, with each turn's reward on its last token.

    The arguments are those of `turn_experience`, except that `gamma` is per token.
    """
    rewards = turn_rewards_to_tokens(turn_rewards, turn_ids) + token_rewards
    return _experience(rewards, values, turn_ids, gamma, gae_lambda, per_turn=False)


def _experience(
    rewards: Tensor, values: Tensor, unit_turns: Tensor, gamma: float, gae_lambda: float, per_turn: bool
) -> Experience:
    mask = unit_turns >= 0
    values = torch.where(mask, values, 0.0)
    advantages, returns = gae(rewards, values, mask, gamma, gae_lambda)
    _, rewards_to_go = gae(rewards, torch.zeros_like(values), mask, gamma, 1.0)
    return Experience(values, advantages, returns, rewards_to_go, unit_turns, per_turn)


def critic_metrics(experience: Experience) -> dict[str, float]:
    """Statistics of values and advantages, overall and by turn index; docs/metrics.md explains the names.

    "Returns" are rewards to go, which the critic has no part in. Undefined statistics are NaN, which TRL's averages
    skip: the explained variance of equal returns, the standard deviation of fewer than two advantages, the mean of
    none. Positions without a unit are ignored.
    """
    units = experience.unit_turns

    def of(kept: Tensor, critic: str, advantage: str) -> dict[str, Tensor]:
        given = experience.values, experience.rewards_to_go, experience.advantages
        values, returns, advantages = (each[kept].float() for each in given)
        return {
            f"{critic}explained_variance": explained_variance(values, returns, torch.ones_like(values)),
            f"{critic}value_mean": values.mean(),
            f"{critic}return_mean": returns.mean(),
            f"{advantage}mean": advantages.mean(),
            f"{advantage}std": advantages.std() if len(advantages) > 1 else advantages.new_tensor(torch.nan),
        }

    metrics = of(units >= 0, "critic/", "advantages/")
    for turn in torch.unique(units[units >= 0]).tolist():
        metrics |= of(units == turn, f"critic/turn_{turn}/", f"critic/turn_{turn}/advantage_")
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
