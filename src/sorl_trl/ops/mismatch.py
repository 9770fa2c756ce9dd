"""How far the sampling engine is from the old policy, per turn and at the worst token of a trajectory."""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import TurnLayout, keep, turn_layout, turn_reduce


def turn_mismatch(log_ratio: Tensor, turn_ids: Tensor | TurnLayout) -> Tensor:
    """Compute g_{i,k} = exp(mean_{t∈k} d_t): (B, K), with 1 for turns that a trajectory does not have.

    Source: verl, ROLL, SkyRL and slime [C], which average over segments or sequences; per turn, ours.

    Args:
        log_ratio: (B, T), d_t = log π_old − log μ of each token, with μ the engine.
        turn_ids: (B, T) int64, the turn of each model token, −1 elsewhere.
    """
    return turn_reduce(log_ratio, turn_ids, "mean").exp()


def is_vetoed(log_ratio: Tensor, turn_ids: Tensor | TurnLayout, least: float) -> Tensor:
    """Find the trajectories with a token whose ratio exp(d_t) is below `least`: (B,) bool.

    The old policy would hardly have sampled such a token, so it would not have written what follows either. Source:
    public implementations [C], with 1e-4. `log_ratio` and `turn_ids` are those of `turn_mismatch`.
    """
    turns = turn_layout(turn_ids)
    return ((keep(log_ratio, turns.loss_mask).exp() < least) & turns.loss_mask).any(dim=1)


def within(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """Find where low <= ratio <= high: elementwise, bool. None sets no bound."""
    inside = torch.ones_like(ratio, dtype=torch.bool)
    inside = inside if low is None else inside & (ratio >= low)
    return inside if high is None else inside & (ratio <= high)
