"""SeeUPO's advantages and its multiplier, for turns that are updated one after the other, the last one first.

Shapes: B trajectories, T completion positions, K turns in the longest trajectory; `turn_mask` (B, K) is 1 where a
trajectory has a turn. Values outside a mask are ignored, even NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sorl_trl.ops import masked_mean
from sorl_trl.ops.credit import centred_within, spread_within
from sorl_trl.ops.masking import at_least_float32

ADVANTAGE_LIMIT = 3.0
"""The largest absolute advantage that SeeUPO allows, before it is multiplied."""
MULTIPLIER_RANGE = (0.8, 1.2)
"""The bounds to which SeeUPO clamps both a turn's ratio and the product of ratios."""
_STD_FLOOR = 1e-6


def backward_turn_advantages(rewards: Tensor, turn_mask: Tensor) -> Tensor:
    """Compare each turn with the same turn of all trajectories that have it: (B, K), 0 where there is none.

    Â_{i,k} = clamp((R_i − R̄_k) / (σ_k + 1e-6), ±3), with R̄_k and the unbiased σ_k over the trajectories that got to
    turn k. Source: SeeUPO (arXiv 2602.06554) [C]; the unbiased σ and its floor are our choices. If only one
    trajectory has a turn, that turn gets 0.

    This baseline is not biased, even if the policy decides when to stop: R̄_k is the reward of those that got to turn
    k, and going there was decided, and is credited, in turn k − 1, whose baseline covers both outcomes. What each turn
    counts does differ: R̄_k includes R_i itself, which scales its gradient by (n_k − 1) / n_k, with n_k the
    trajectories that have it, and σ_k scales it, too.

    Args:
        rewards: (B,), R_i of each whole trajectory.
        turn_mask: (B, K), 0 also for trajectories without a reward.
    """
    columns = torch.arange(turn_mask.size(1), device=turn_mask.device).expand(turn_mask.shape)
    centred = centred_within(rewards.unsqueeze(1).expand(turn_mask.shape), turn_mask, columns)
    standardised = centred / (spread_within(centred, turn_mask, columns) + _STD_FLOOR)
    return standardised.clamp(-ADVANTAGE_LIMIT, ADVANTAGE_LIMIT)


def next_multiplier(multiplier: Tensor, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Multiply M by the ratio of the turn that was just updated: (B,), without gradient.

    M_i ← clamp(M_i · clamp(exp(mean_{t∈k} ℓ_t), 0.8, 1.2), 0.8, 1.2). Source: SeeUPO (arXiv 2602.06554) [C]. A
    trajectory without the turn keeps its M_i: the mean over no token is 0.

    Args:
        multiplier: (B,), M so far, which starts at 1.
        log_ratio: (B, T), ℓ_t = log π_new − log π_old, from before the turn's updates to after them.
        mask: (B, T), 1 on the tokens of the turn.
    """
    ratio = masked_mean(log_ratio.detach(), mask, dim=1).exp().clamp(*MULTIPLIER_RANGE)
    return (at_least_float32(multiplier.detach()) * ratio).clamp(*MULTIPLIER_RANGE)
