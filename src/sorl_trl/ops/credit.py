"""Other ways to credit turns, and the choice of groups to train on.

Turns are credited by the information they gain, normalized separately from outcomes, or compared with the turns in the
same state, of the same agent, or of the same index.

Shapes: B trajectories, K turns in the longest one; `turn_mask` (B, K) is 1 where a trajectory has a turn. A group is
the G trajectories of one prompt, in G consecutive rows; N groups make B = N · G rows. Values outside a mask are
ignored, even NaN, and results there are 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .advantages import STD_FLOOR, turn_returns
from .masking import at_least_float32, check_groups, keep, widest

__all__ = [
    "differing_groups",
    "group_spread",
    "information_gains",
    "matched_advantages",
    "separate_turn_advantages",
]

_NO_SPREAD = 1e-6
"""A standard deviation up to this is due to rounding: the rewards of the group are equal."""


def information_gains(scores: Tensor, turn_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute by how much each turn raises the score of the state, r_k = s_{k+1} − s_k, and where that is defined.

    s_k scores the state in which turn k starts. In IGPO (arXiv 2510.14967, as in the paper) it is the mean
    log-probability of the golden answer's tokens after that state. The last turn of a trajectory has no gain, because
    the outcome rewards it; neither does a turn with a non-finite score before or after it.

    Args:
        scores: (B, K), NaN where a state has no score.
        turn_mask: (B, K), 1 where a trajectory has a turn.

    Returns:
        The gains (B, K), 0 where there is none, and a (B, K) bool mask that is True where there is one.
    """
    scores = at_least_float32(scores)
    following = torch.cat([scores[:, 1:], torch.full_like(scores[:, :1], torch.nan)], dim=1)
    has_next = torch.cat([turn_mask[:, 1:], torch.zeros_like(turn_mask[:, :1])], dim=1).bool()
    has_gain = has_next & turn_mask.bool() & scores.isfinite() & following.isfinite()
    return keep(following, has_gain) - keep(scores, has_gain), has_gain


def separate_turn_advantages(
    kinds: Sequence[tuple[Tensor, Tensor]], turn_mask: Tensor, num_generations: int, gamma: float, scale: str
) -> Tensor:
    """Normalize each kind of reward in its group first, then discount: Â_{i,k} = Σ_{j≥k} γ^{j−k} r̃_{i,j}, (B, K).

    r̃ is the sum of `normalize_entries` over the kinds. With turn rewards and outcomes as the kinds, this is IGPO's
    advantage (arXiv 2510.14967, as in the paper and as read in its public code). A missing reward does not count as 0:
    it enters neither mean nor spread, and adds nothing to a sum.

    Args:
        kinds: For each kind of reward, the rewards (B, K) and a mask (B, K), 1 where there is a reward.
        turn_mask: (B, K), 1 where a trajectory has a turn.
        num_generations: G, the trajectories of a group; it must divide B.
        gamma: Discount per turn.
        scale: "group" divides by the σ of the group, "batch" by the σ of all entries, as TRL's `scale_rewards` does
            with outcomes, and "none" does not divide.

    Raises:
        ValueError: `num_generations` does not divide B.
    """
    normalized = at_least_float32(torch.zeros_like(turn_mask))
    for rewards, mask in kinds:
        kept = mask.bool() & turn_mask.bool()
        normalized = normalized + normalize_entries(rewards, kept, num_generations, scale)
    return turn_returns(normalized, turn_mask, gamma)


def normalize_entries(x: Tensor, mask: Tensor, num_generations: int, scale: str) -> Tensor:
    """Compare every entry of `x` with all entries of its group: (x − x̄) / (σ + 1e-4) where `mask` is 1, (B, K).

    x̄ is the mean over all entries of a group, with equal weights, and σ their unbiased standard deviation (IGPO,
    arXiv 2510.14967; 1e-4 is TRL's). A single entry gives 0. Other arguments and errors are those of
    `separate_turn_advantages`.
    """
    check_groups(num_generations, len(x), "rows of x")
    groups = torch.arange(len(x), device=x.device) // num_generations
    groups = groups.unsqueeze(1).expand(x.shape)
    centred = centred_within(x, mask, groups)
    if scale == "none":
        return centred
    if scale == "batch":
        everywhere = torch.zeros_like(groups)
        return centred / (spread_within(centred_within(x, mask, everywhere), mask, everywhere) + STD_FLOOR)
    return centred / (spread_within(centred, mask, groups) + STD_FLOOR)


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
