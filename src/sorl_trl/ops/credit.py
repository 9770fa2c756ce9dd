"""Other ways to credit turns, and the choice of groups to train on.

Turns are compared with the turns in the same state or of the same agent.

Shapes: B trajectories, K turns in the longest one; `turn_mask` (B, K) is 1 where a trajectory has a turn. A group is
the G trajectories of one prompt, in G consecutive rows; N groups make B = N · G rows. Values outside a mask are
ignored, even NaN, and results there are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .advantages import STD_FLOOR
from .masking import at_least_float32, check_groups, keep, widest

__all__ = [
    "differing_groups",
    "group_spread",
    "matched_advantages",
]

_NO_SPREAD = 1e-6
"""A standard deviation up to this is due to rounding: the rewards of the group are equal."""


def matched_advantages(
    returns: Tensor, labels: Tensor, turn_mask: Tensor, num_generations: int, scale: bool
) -> Tensor:
    """Compare turns of a group that have the same label: Â_{i,k} = (R_{i,k} − μ) / (σ + 1e-4), (B, K).

    With states as labels, this is the step-level advantage of GiGPO (arXiv 2505.10978, as in its public code); with
    agents, Dr. MAS (arXiv 2602.08847, where σ is biased; as in its public code). 1e-4, which is TRL's, is 1e-6 in both
    codes. Where the unbiased σ is 0, as for a label's only turn, Â is 0; Dr. MAS's code gives that turn its reward.

    Args:
        returns: (B, K), from `turn_returns`.
        labels: (B, K) int64, any numbers: μ and σ are those of all turns of the group with the same one.
        turn_mask: (B, K), 1 where a trajectory has a turn.
        num_generations: G, the trajectories of a group.
        scale: Whether to divide by σ + 1e-4.
    """
    index = _label_index(labels, turn_mask, num_generations)
    centred = centred_within(at_least_float32(returns), turn_mask, index)
    if not scale:
        return centred
    spread = spread_within(centred, turn_mask, index)
    return torch.where(spread > _NO_SPREAD, centred / (spread + STD_FLOOR), 0.0)


def group_spread(rewards: Tensor, num_generations: int) -> Tensor:
    """Compute the standard deviation of each group's rewards: (B,) to (N,) float64 (float32 on MPS).

    As in TRL, the divisor is the number of rewards less one. The result is 0 with fewer than two rewards, and NaN with
    an infinite one.

    Args:
        rewards: (B,), NaN where a trajectory has none.
        num_generations: G, which must divide B.

    Raises:
        ValueError: `num_generations` does not divide B.
    """
    check_groups(num_generations, len(rewards), "rewards")
    groups = rewards.to(widest(rewards.device)).view(-1, num_generations)
    scored = ~groups.isnan()
    count = scored.sum(1, keepdim=True)
    groups = torch.where(scored, groups, 0.0)
    deviations = torch.where(scored, groups - groups.sum(1, keepdim=True) / count.clamp(min=1), 0.0)
    return (deviations.square().sum(1) / (count.squeeze(1) - 1).clamp(min=1)).sqrt()


def differing_groups(spread: Tensor) -> Tensor:
    """Find the groups with a standard deviation (`group_spread`) above 1e-6: (N,) to (N,) bool; False where it is NaN.

    Source: DAPO (arXiv 2503.14476, second-hand).
    """
    return spread > _NO_SPREAD


def centred_within(x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """`x` less the mean of the entries that have the same `index`, 0 where `weights`, such as a mask, are 0."""
    centred = keep(x, weights)
    weights = weights.to(centred.dtype)
    total = _sums_within(weights, index).clamp(min=1)
    # The second pass removes what rounding left of the mean of equal entries, which 1 / (σ + 1e-4) would blow up.
    for _ in range(2):
        centred = keep(centred - _sums_within(weights * centred, index) / total, weights)
    return centred


def spread_within(centred: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """The unbiased standard deviation of the entries that have the same `index`, for each entry."""
    weights = weights.to(centred.dtype)
    variance = _sums_within(weights * centred.square(), index) / (_sums_within(weights, index) - 1).clamp(min=1)
    is_positive = variance > 0  # the square root of 0 has an infinite gradient
    return torch.where(is_positive, torch.where(is_positive, variance, 1.0).sqrt(), 0.0)


def _label_index(labels: Tensor, turn_mask: Tensor, num_generations: int) -> Tensor:
    """(B, K) int64: a number from 0 for each pair of group and label; 0 also for absent turns."""
    index = torch.zeros_like(labels)
    kept = turn_mask.bool()
    groups = (torch.arange(len(labels), device=labels.device) // num_generations).unsqueeze(1).expand(labels.shape)
    pairs = torch.stack([groups[kept], labels[kept]], dim=1)
    index[kept] = torch.unique(pairs, dim=0, return_inverse=True)[1]
    return index


def _sums_within(x: Tensor, index: Tensor) -> Tensor:
    """The sum of `x` over all entries that have the same `index`, for each entry: the shape of `x`."""
    flat, index_flat = x.reshape(-1), index.reshape(-1)
    return torch.zeros_like(flat).scatter_add(0, index_flat, flat).gather(0, index_flat).view(x.shape)
