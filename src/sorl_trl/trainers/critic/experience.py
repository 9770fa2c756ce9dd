"""Computes advantages and returns from rewards and the critic's values, by turn or by token, and their metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sorl_trl.ops import (
    explained_variance,
    token_gae,
    turn_broadcast,
    turn_gae,
    turn_mask,
    turn_reduce,
    turn_returns,
    turn_rewards_to_tokens,
    turn_starts,
)


@dataclass(frozen=True)
class Experience:
    """Values, advantages and returns of B trajectories, for each of U turns or tokens (`advantage_level`)."""

    values: Tensor
    """(B, U) V of the state in which the unit starts, before any update."""
    advantages: Tensor
    """(B, U), not whitened."""
    returns: Tensor
    """(B, U) the critic's targets, Â + V."""
    rewards_to_go: Tensor
    """(B, U) discounted sum of the rewards from here on."""
    unit_turns: Tensor
    """(B, U) int64, the turn that a unit is or belongs to; -1 where there is no unit."""
    per_turn: bool
    """Whether a unit is a turn."""

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
    mask = turn_mask(turn_ids)
    turn_values = turn_reduce(torch.where(turn_starts(turn_ids), values, 0.0), turn_ids, "sum")
    turns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    rewards = turn_rewards + turn_reduce(token_rewards, turn_ids, "sum")
    advantages, returns = turn_gae(rewards, turn_values, mask, gamma, gae_lambda)
    rewards_to_go = turn_returns(rewards, mask, gamma)
    return Experience(turn_values, advantages, returns, rewards_to_go, torch.where(mask.bool(), turns, -1), True)


def token_experience(
    turn_rewards: Tensor, token_rewards: Tensor, values: Tensor, turn_ids: Tensor, gamma: float, gae_lambda: float
) -> Experience:
    """GAE over the policy's tokens, skipping observations, with each turn's reward on its last token.

    The arguments are those of `turn_experience`, except that `gamma` is per token.
    """
    mask = turn_ids >= 0
    values = torch.where(mask, values, 0.0)
    rewards = turn_rewards_to_tokens(turn_rewards, turn_ids) + torch.where(mask, token_rewards, 0.0)
    advantages, returns = token_gae(rewards, values, mask, gamma, gae_lambda)
    _, rewards_to_go = token_gae(rewards, torch.zeros_like(values), mask, gamma, 1.0)
    return Experience(values, advantages, returns, rewards_to_go, turn_ids, False)


def critic_metrics(experience: Experience) -> dict[str, float]:
    """Statistics of values and advantages, overall and by turn index; docs/metrics.md explains the names.

    Undefined ones are NaN, which TRL's averages skip: the explained variance of equal returns, the standard deviation
    of fewer than two advantages, the mean of none. Positions without a unit are ignored.
    """
    units = experience.unit_turns
    overall = _statistics(experience, units >= 0)
    metrics = {f"critic/{name}": overall[name] for name in ("explained_variance", "value_mean", "return_mean")}
    metrics |= {f"advantages/{name}": overall[f"advantage_{name}"] for name in ("mean", "std")}
    for turn in torch.unique(units[units >= 0]).tolist():
        of_turn = _statistics(experience, units == turn)
        metrics |= {f"critic/turn_{turn}/{name}": statistic for name, statistic in of_turn.items()}
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


def _statistics(experience: Experience, kept: Tensor) -> dict[str, Tensor]:
    """Statistics of the units in `kept`. "Returns" are rewards to go, which the critic has no part in."""
    given = experience.values, experience.rewards_to_go, experience.advantages
    values, returns, advantages = (each[kept].float() for each in given)
    return {
        "explained_variance": explained_variance(values, returns, torch.ones_like(values)),
        "value_mean": values.mean(),
        "return_mean": returns.mean(),
        "advantage_mean": advantages.mean(),
        "advantage_std": advantages.std() if len(advantages) > 1 else advantages.new_tensor(torch.nan),
    }
