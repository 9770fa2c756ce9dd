"""A guard against the likelihood of good trajectories falling (LLDS)."""

from __future__ import annotations

import torch
from torch import Tensor

from ._shared import keep
from .layout import TurnLayout, turn_layout
from .masking import masked_mean, turn_reduce


def good_trajectories(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Find the trajectories whose advantage, in the mean over their model tokens, is at least 0: (B,) bool.

    LLDS has one advantage per trajectory; the mean, where turns or tokens have their own, is ours.

    Args:
        advantages: (B, T), or (B, 1) where all tokens of a trajectory have the same.
        loss_mask: (B, T), 1 on model tokens. A trajectory without one is good, and has nothing to guard.
    """
    return masked_mean(advantages, loss_mask, dim=1) >= 0


def likelihood_falls(log_ratio: Tensor, turn_ids: Tensor | TurnLayout, good: Tensor) -> tuple[Tensor, Tensor]:
    """Compute how far the likelihood of each good turn has fallen token by token, where that of the turn has fallen.

    F_{i,k} = 1[Σ_{t∈k} Δ_t > 0] Σ_{t∈k} max(0, Δ_t), with Δ_t = log π_old − log π_θ = −ℓ_t: (B, K), in nats, and the
    gate, (B, K) bool. LLDS's loss is Σ_i Σ_k F_{i,k} / N, with N the tokens of all good trajectories.

    Source: LLDS (arXiv 2512.04220) [P, C]. The public code divides by the tokens of all responses instead of N.
    Trajectories whose advantage is 0 are good there and here.

    Args:
        log_ratio: (B, T), ℓ_t = log π_θ − log π_old of each token, with gradient. A token at exactly 0 has none.
        turn_ids: (B, T) int64, the turn of each model token, −1 elsewhere.
        good: (B,) bool; the other trajectories give 0, and their gate is closed.
    """
    turns = turn_layout(turn_ids)
    fall = -keep(log_ratio, turns.loss_mask & good.unsqueeze(1))
    has_fallen = turn_reduce(fall.detach(), turns, "sum") > 0
    return torch.where(has_fallen, turn_reduce(fall.relu(), turns, "sum"), 0.0), has_fallen
