"""How much the rewards of a group differ, and which groups are worth training on.

A group is the G trajectories of one prompt, in G rows that follow each other; N groups make B = N · G rows. What is
NaN is no reward and counts nowhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sorl_trl.checks import SHARE, check_choice, check_number

from ._shared import check_groups

GROUP_FILTERS = ("none", "zero_variance", "top_k", "top_p")
_NO_SPREAD = 1e-6
"""A standard deviation up to this is rounding: the rewards of the group are equal."""


def group_spread(rewards: Tensor, num_generations: int) -> Tensor:
    """Compute the standard deviation of each group's rewards: (B,) to (N,) float64.

    It divides by the rewards less one, as TRL's does; with fewer than two rewards it is 0, with an infinite one NaN.

    Args:
        rewards: (B,), NaN where a trajectory has none.
        num_generations: G, which must divide B.

    Raises:
        ValueError: `num_generations` does not divide B.
    """
    check_groups(num_generations, len(rewards), "rewards")
    groups = rewards.double().view(-1, num_generations)
    scored = ~groups.isnan()
    count = scored.sum(1, keepdim=True)
    groups = torch.where(scored, groups, 0.0)
    deviations = torch.where(scored, groups - groups.sum(1, keepdim=True) / count.clamp(min=1), 0.0)
    return (deviations.square().sum(1) / (count.squeeze(1) - 1).clamp(min=1)).sqrt()


def kept_groups(spread: Tensor, group_filter: str, share: float = 1.0) -> Tensor:
    """Choose the groups to train on: (N,) standard deviations to (N,) bool.

    "none" keeps all; "zero_variance" those whose rewards differ, that is by more than 1e-6 (DAPO, arXiv 2503.14476,
    second-hand); "top_k" of these the ⌈share · N⌉ that differ most (StarPO-S, arXiv 2504.20073, as read in a public
    implementation, where ⌊share · N⌋ may be 0); "top_p" the fewest that hold `share` of the sum of all variances
    (RAGEN-2, arXiv 2604.06268, as read there), and at least one. Of equal spreads the first comes first. A group whose
    rewards are equal, or whose spread is NaN, is kept by "none" alone (ours, of "top_k" and "top_p").

    Args:
        spread: from `group_spread`.
        group_filter: one of `GROUP_FILTERS`.
        share: of the groups, or of the variance, in [0, 1].

    Raises:
        ValueError: another `group_filter`, or `share` is outside [0, 1].
    """
    check_choice("group_filter", group_filter, GROUP_FILTERS)
    check_number("share", share, SHARE)
    if group_filter == "none":
        return torch.ones_like(spread, dtype=torch.bool)
    differs = spread > _NO_SPREAD
    if group_filter == "zero_variance" or not len(spread):
        return differs
    order = torch.where(differs, spread, 0.0).argsort(descending=True, stable=True)  # NaN would come first
    if group_filter == "top_k":
        # Rounding must not make 8 of 7 · 100 %.
        first = torch.arange(len(order), device=spread.device) < max(math.ceil(share * len(order) - 1e-9), 1)
    else:
        variances = torch.where(differs, spread.square(), 0.0)[order]
        before = variances.cumsum(0) - variances
        first = before < share * variances.sum() * (1 - 1e-9) if share < 1 else torch.ones_like(differs)
        first[0] = True
    return torch.zeros_like(differs).scatter(0, order, first) & differs
