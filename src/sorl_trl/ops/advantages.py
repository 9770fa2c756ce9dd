"""Returns and advantages of turns and tokens, and their normalization.

Shapes: B trajectories, T completion positions, K turns in the longest trajectory; `turn_mask` (B, K) is 1 where a
trajectory has a turn. Values outside a mask are ignored, and results there are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import check_groups, keep, masked_mean, turn_broadcast, turn_ends

__all__ = [
    "explained_variance",
    "group_turn_advantages",
    "leave_one_out_advantages",
    "outcome_advantages",
    "summed_advantages",
    "token_gae",
    "turn_gae",
    "turn_returns",
    "turn_rewards_to_tokens",
    "turn_std",
    "whiten",
]

STD_FLOOR = 1e-4
"""The constant that TRL's GRPO adds to the standard deviation of a group."""
_VARIANCE_FLOOR = 1e-8
"""The constant that TRL's PPO adds to the variance when it whitens."""


def turn_returns(turn_rewards: Tensor, turn_mask: Tensor, gamma: float) -> Tensor:
    """Discount the rewards from each turn on: R_k = Σ_{j≥k} γ^{j−k} r_j, (B, K)."""
    _, returns = turn_gae(turn_rewards, torch.zeros_like(turn_rewards), turn_mask, gamma, lam=1.0)
    return returns


def group_turn_advantages(returns: Tensor, turn_mask: Tensor, num_generations: int, scale: bool = True) -> Tensor:
    """Compare turns within each group of `num_generations` rows: Â_{i,k} = (R_{i,k} − b_k) / (σ + 1e-4), (B, K).

    b_k = mean_j R_{j,0} + mean_{j has turn k} (R_{j,k} − R_{j,0}): what the group's trajectories earn on average, less
    what those that have a turn k have earned before it. A turn is thus compared with the turns of the same index, and
    a trajectory that stops early still counts. If all have equally many turns, b_k is the mean of R_{j,k}. If the
    turns of each trajectory have the same return, this is GRPO's advantage (arXiv 2402.03300), whatever the turn
    counts. We chose the baseline and σ, which is `turn_std`. A trajectory without a turn enters neither, and gets 0.

    The baseline adds no bias if the policy decides when to stop: going on is credited in the turn that decides it, and
    the baseline of that turn covers both outcomes, while a turn changes nothing that was earned before it. Each
    trajectory is part of its own baseline, so without a discount the expected gradient is (G − 1) / G of the exact
    one, as in GRPO; with `leave_one_out_advantages` it is the exact one. With a discount, a group in which every
    answer is right is ranked by its numbers of turns, and σ scales these small differences up to full size.

    Args:
        returns: (B, K), from `turn_returns`.
        turn_mask: (B, K), 1 where a trajectory has a turn; its turns come first.
        num_generations: G, the trajectories of a group; it must divide B.
        scale: Whether to divide by σ + 1e-4.

    Raises:
        ValueError: `num_generations` does not divide B.
    """
    advantages = _compared_in_group(returns, turn_mask, num_generations)
    return advantages / (turn_std(returns, turn_mask, num_generations) + STD_FLOOR) if scale else advantages


def outcome_advantages(rewards: Tensor, num_generations: int, scale: str) -> tuple[Tensor, Tensor]:
    """Compare the rewards of trajectories within each group: Â_i = (r_i − mean r) / (σ + 1e-4), and σ, both (N,).

    Source: GRPO (arXiv 2402.03300), as in TRL. A trajectory whose reward is NaN enters neither mean nor σ, and gets 0.

    Args:
        rewards: (N,), group after group.
        num_generations: G, the trajectories of a group; it must divide N.
        scale: "group" divides by the σ of the group, "batch" by that of all, and "none" does not divide; σ is then the
            group's, and shows which groups have differing rewards.
    """
    grouped = rewards.view(-1, num_generations)
    advantages = (grouped - grouped.nanmean(1, keepdim=True)).view(-1)
    std = _nan_std(rewards.view(1, -1) if scale == "batch" else grouped)
    std = std.repeat_interleave(len(rewards) // len(std))
    return (advantages if scale == "none" else advantages / (std + STD_FLOOR)).nan_to_num(nan=0.0), std


def summed_advantages(rewards_per_func: Tensor, weights: Tensor, num_generations: int) -> tuple[Tensor, Tensor]:
    """Compare the rewards of each function within its group, sum, and scale over the batch: Â and σ, both (N,).

    Source: TRL's `multi_objective_aggregation="normalize_then_sum"`.

    Args:
        rewards_per_func: (N, F), group after group, NaN where a function gave none.
        weights: (F,).
        num_generations: G; it must divide N.
    """
    grouped = rewards_per_func.view(-1, num_generations, len(weights)).transpose(1, 2)
    normalized = (grouped - grouped.nanmean(2, keepdim=True)) / (_nan_std(grouped).unsqueeze(2) + STD_FLOOR)
    summed = (normalized.transpose(1, 2).reshape_as(rewards_per_func) * weights).nansum(1)
    return outcome_advantages(summed.masked_fill(rewards_per_func.isnan().all(1), torch.nan), len(summed), "batch")


def _nan_std(x: Tensor) -> Tensor:
    """The standard deviation over the last dimension, ignoring NaN; NaN for one value among several, 0 for one."""
    if x.size(-1) == 1:
        return torch.zeros_like(x[..., 0])
    count = (~x.isnan()).sum(-1)
    variance = (x - x.nanmean(-1, keepdim=True)).square().nansum(-1) / (count - 1).clamp(min=1)
    return variance.sqrt().masked_fill(count < 2, torch.nan)


def leave_one_out_advantages(returns: Tensor, turn_mask: Tensor, num_generations: int) -> Tensor:
    """Compare turns with the other trajectories of their group: Â_{i,k} = R_{i,k} − b_{k,−i}, (B, K).

    b_{k,−i} is the baseline of `group_turn_advantages` with both means over the other trajectories alone. If all turns
    of each trajectory have the same return, this is LOOP's advantage (arXiv 2502.01600, as read in a public
    implementation), G / (G − 1) times the unscaled `group_turn_advantages`; we added the comparison of turns. A turn
    that no other trajectory has is credited with its whole trajectory's return, R_{i,0} less the others' mean. A
    trajectory without a turn enters no baseline and gets 0; so does a trajectory that alone in its group has turns.
    Arguments and errors are those of `group_turn_advantages`.
    """
    return _compared_in_group(returns, turn_mask, num_generations, leave_one_out=True)


def turn_std(returns: Tensor, turn_mask: Tensor, num_generations: int) -> Tensor:
    """Compute σ of each trajectory's group: σ² = Σ_i mean_k (R_{i,k} − b_k)² / (G − 1), (B, 1).

    b_k is the baseline of `group_turn_advantages`, with the same arguments and errors. G counts the group's
    trajectories that have a turn; with fewer than two, σ is 0. With `num_generations` = B, the result is the σ of the
    batch.
    """
    deviations = _compared_in_group(returns, turn_mask, num_generations)
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

    δ_t = r_t + γ V_{t'} − V_t and Â_t = δ_t + γλ Â_{t'}, where t' is the trajectory's next model token, with V and Â 0
    after the last one; returns = Â + V. Observations are skipped: their rewards and values are ignored, and they cause
    no discounting.

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

    It is 1 if the values equal the returns up to a constant, 0 if they are constant, and negative if the errors vary
    more than the returns. It is NaN if Var(R) is 0 up to rounding (our choice: at most (10 ε)² times the mean of R²,
    with ε the machine precision), so also with fewer than two kept positions.

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


def _compared_in_group(
    returns: Tensor, turn_mask: Tensor, num_generations: int, leave_one_out: bool = False
) -> Tensor:
    """`returns` (B, K) less the baseline of their group, 0 where a trajectory has no such turn.

    Computed as what trajectory i earns beyond the others in total, less what it earned beyond them before turn k.
    """
    check_groups(num_generations, len(returns), "rows of returns")
    mask = turn_mask.bool().view(len(returns) // num_generations, num_generations, turn_mask.size(1))
    returns_of = keep(returns, turn_mask).view(mask.shape)
    whole = returns_of[..., :1]
    earned_before = _less_mean(whole - returns_of, mask, leave_one_out)
    advantages = keep(_less_mean(whole, mask[..., :1], leave_one_out) - earned_before, mask)
    return advantages.view(returns.shape)


def _less_mean(x: Tensor, mask: Tensor, leave_one_out: bool) -> Tensor:
    """`x` (N, G, K) less its mean over G where `mask` is 1, or less the mean of the others; 0 elsewhere."""
    # The second pass removes what rounding left of the mean of equal returns, which 1 / (σ + 1e-4) would blow up.
    for _ in range(2):
        x = keep(x - masked_mean(x, mask, dim=1).unsqueeze(1), mask)
    if not leave_one_out:
        return x
    count = mask.sum(dim=1, keepdim=True)
    return x * count / (count - 1).clamp(min=1)
