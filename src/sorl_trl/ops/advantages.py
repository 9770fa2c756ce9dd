"""Returns and advantages of turns and tokens, and their normalization.

Shapes: B trajectories, T completion positions, K turns in the longest trajectory; `turn_mask` (B, K) is 1 where a
trajectory has a turn. Values outside a mask are ignored, and results there are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import check_groups, keep, masked_mean, turn_broadcast, turn_ends

STD_FLOOR = 1e-4
"""The constant that TRL's GRPO adds to the standard deviation of a group."""
_VARIANCE_FLOOR = 1e-8
"""The constant that TRL's PPO adds to the variance when it whitens."""


def turn_returns(turn_rewards: Tensor, turn_mask: Tensor, gamma: float) -> Tensor:
    """Discount the rewards from each turn on: R_k = Σ_{j≥k} γ^{j−k} r_j, (B, K)."""
    _, returns = turn_gae(turn_rewards, torch.zeros_like(turn_rewards), turn_mask, gamma, lam=1.0)
    return returns


def group_turn_advantages(returns: Tensor, turn_mask: Tensor, num_generations: int, scale: bool = True) -> Tensor:
    """Compare turns within each group of `num_generations` rows: Â_{i,k} = (R_{i,k} − R̄) / (σ + 1e-4), (B, K).

    R̄ is the mean over the group's trajectories of their mean over turns, so a trajectory with many turns counts as
    much as one with few; σ is `turn_std`. If the turns of each trajectory have the same return, this is GRPO's
    advantage (arXiv 2402.03300). A trajectory without a turn does not enter R̄ and σ, and gets 0.

    Args:
        returns: (B, K), from `turn_returns`.
        turn_mask: (B, K), 1 where a trajectory has a turn.
        num_generations: G, the trajectories of a group; it must divide B.
        scale: Whether to divide by σ + 1e-4.

    Raises:
        ValueError: `num_generations` does not divide B.
    """
    advantages = _centre_in_group(returns, turn_mask, num_generations)
    return advantages / (turn_std(returns, turn_mask, num_generations) + STD_FLOOR) if scale else advantages


def leave_one_out_advantages(returns: Tensor, turn_mask: Tensor, num_generations: int) -> Tensor:
    """Compare turns with the other trajectories of their group: Â_{i,k} = R_{i,k} − R̄_{−i}, (B, K).

    R̄_{−i} is the mean over the group's other trajectories of their mean over turns. If all turns of each trajectory
    have the same return, this is LOOP's advantage (arXiv 2502.01600, as read in a public implementation), G / (G − 1)
    times the unscaled `group_turn_advantages`; the mean over turns is ours. A trajectory without a turn enters no
    baseline and gets 0, and so does the only trajectory of its group with a turn. Arguments and errors are those of
    `group_turn_advantages`.
    """
    centred = _centre_in_group(returns, turn_mask, num_generations)
    counted = turn_mask.bool().any(dim=1).view(-1, num_generations).sum(dim=1)
    others = (counted - 1).repeat_interleave(num_generations).unsqueeze(1)
    # R̄ − R̄_{−i} = (m_i − R̄) / (n − 1), with m_i the trajectory's own mean over turns and n the group's trajectories.
    shift = masked_mean(centred, turn_mask, dim=1).unsqueeze(1) / others.clamp(min=1)
    return torch.where(others > 0, keep(centred + shift, turn_mask), 0.0)


def turn_std(returns: Tensor, turn_mask: Tensor, num_generations: int) -> Tensor:
    """Compute σ of each trajectory's group: σ² = Σ_i mean_k (R_{i,k} − R̄)² / (G − 1), (B, 1).

    G counts the group's trajectories that have a turn. With fewer than two, the divisor is 1 (our choice), because
    returns of one trajectory's turns may differ. Arguments and errors are those of `group_turn_advantages`. With
    `num_generations` = B, the result is the σ of the batch.
    """
    deviations = _centre_in_group(returns, turn_mask, num_generations)
    variances = masked_mean(deviations.square(), turn_mask, dim=1).view(-1, num_generations)
    counted = turn_mask.bool().any(dim=1).view(-1, num_generations).sum(dim=1)
    std = (variances.sum(dim=1) / (counted - 1).clamp(min=1)).sqrt()
    return std.repeat_interleave(num_generations).unsqueeze(1)


def turn_gae(
    turn_rewards: Tensor, turn_values: Tensor, turn_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Estimate advantages by GAE (arXiv 1506.02438) with a turn as the time step: advantages and returns, each (B, K).

    δ_k = r_k + γ V(s_{k+1}) − V(s_k), Â_k = Σ_l (γλ)^l δ_{k+l}, returns = Â + V, and V after the last turn is 0.

    Args:
        turn_rewards: (B, K), the reward of each turn, with the outcome reward on the last one.
        turn_values: (B, K), V(s_k), the critic at the last token before turn k.
        turn_mask: (B, K), 1 where a trajectory has a turn.
        gamma, lam: Discount γ per turn, and λ. With both 1, Â_k = R_k − V(s_k).
    """
    return token_gae(turn_rewards, turn_values, turn_mask, gamma, lam)


def token_gae(rewards: Tensor, values: Tensor, loss_mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Estimate advantages by GAE (arXiv 1506.02438) over the model tokens: advantages and returns, each (B, T).

    δ_t = r_t + γ V_{t'} − V_t and Â_t = δ_t + γλ Â_{t'}, where t' is the trajectory's next model token, with V and Â
    0 after the last one; returns = Â + V. Observations are skipped: their rewards and values are ignored, and they
    are not discounted for.

    Args:
        rewards: (B, T), the reward of each model token, with the outcome reward on the last one.
        values: (B, T), the critic's V_t.
        loss_mask: (B, T), 1 on model tokens.
        gamma, lam: Discount γ per token, and λ.
    """
    kept = loss_mask.bool()
    rewards, values = keep(rewards, kept), keep(values, kept)
    advantages = torch.zeros_like(rewards + values)
    next_value = next_advantage = advantages.new_zeros(len(advantages))
    for t in reversed(range(advantages.size(1))):
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        next_advantage = torch.where(kept[:, t], advantage, next_advantage)
        next_value = torch.where(kept[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(kept[:, t], advantage, 0.0)
    return advantages, advantages + values


def turn_rewards_to_tokens(turn_rewards: Tensor, turn_ids: Tensor) -> Tensor:
    """Put each turn's reward on the turn's last token, and 0 on all others: (B, K) to (B, T), for `token_gae`.

    Args:
        turn_rewards: (B, K) or more columns; those of turns that a trajectory does not have are ignored.
        turn_ids: (B, T).

    Raises:
        ValueError: `turn_ids` has more turns than `turn_rewards` has columns.
    """
    return keep(turn_broadcast(turn_rewards, turn_ids), turn_ends(turn_ids))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Compute the share of the returns' variance that the values predict, 1 − Var(R − V) / Var(R): ().

    It is 1 for values that equal the returns up to a constant, 0 for constant values, and negative for values whose
    errors vary more than the returns. It is NaN if Var(R) is 0 up to rounding (our choice: at most (10 ε)² times the
    mean of R², with ε the machine precision), so also with fewer than two kept positions.

    Args:
        values, returns: The critic's values V and the returns R that they predict, of the same shape.
        mask: The shape of `values`, 1 where a position is kept.
    """
    values, returns = keep(values, mask), keep(returns, mask)
    variance = _masked_variance(returns, mask)
    rounding = (10 * torch.finfo(returns.dtype).eps) ** 2 * masked_mean(returns.square(), mask)
    share = _masked_variance(returns - values, mask) / variance
    return torch.where(variance <= rounding, torch.nan, 1 - share)


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale `x` to unit variance over the positions where `mask` is 1. The result has its shape, and 0 elsewhere.

    The variance is the unbiased variance plus 1e-8, as in TRL's PPO. Fewer than two kept values have variance 0.

    Args:
        x: Any shape.
        mask: The shape of `x`, 1 where `x` is kept.
        shift_mean: Whether to subtract the mean; otherwise the mean of `x` is kept.
    """
    mean = masked_mean(x, mask)
    deviations = keep(keep(x, mask) - mean, mask)
    # For equal values, the scaling below would multiply what rounding left of the mean by up to 1e4.
    deviations = keep(deviations - masked_mean(deviations, mask), mask)
    variance = deviations.square().sum() / (mask.bool().sum() - 1).clamp(min=1)
    whitened = deviations * (variance + _VARIANCE_FLOOR).rsqrt()
    return whitened if shift_mean else keep(whitened + mean, mask)


def _masked_variance(x: Tensor, mask: Tensor) -> Tensor:
    """Mean squared deviation of `x` from its mean, both where `mask` is 1: ()."""
    return masked_mean((x - masked_mean(x, mask)).square(), mask)


def _centre_in_group(returns: Tensor, turn_mask: Tensor, num_generations: int) -> Tensor:
    """`returns` (B, K) less the baseline R̄ of their group, 0 where a trajectory has no such turn."""
    check_groups(num_generations, len(returns), "rows of returns")
    centred = returns
    # The second pass removes what rounding left of the mean of equal returns, which 1 / (σ + 1e-4) would blow up.
    for _ in range(2):
        baseline = _group_mean(masked_mean(centred, turn_mask, dim=1), turn_mask.bool().any(dim=1), num_generations)
        centred = keep(centred - baseline, turn_mask)
    return centred


def _group_mean(x: Tensor, mask: Tensor, num_generations: int) -> Tensor:
    """The mean of `x` (B,) over its group where `mask` (B,) is 1, for each row: (B, 1)."""
    means = masked_mean(x.view(-1, num_generations), mask.view(-1, num_generations), dim=1)
    return means.repeat_interleave(num_generations).unsqueeze(1)
