"""How far the sampling engine is from the old policy, per turn and at the worst token of a trajectory."""

from __future__ import annotations

import torch
from torch import Tensor

from sorl_trl.checks import check_choice

from .masking import TurnLayout, keep, turn_layout, turn_reduce

ENGINE_RATIOS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""TRL's ways to bound the ratio of old policy to engine."""


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


def engine_ratio(
    log_ratio: Tensor, loss_mask: Tensor, mode: str, least: float | None = None, most: float | None = None
) -> Tensor:
    """Compute π_old/μ of tokens, (B, T), or of sequences, (B, 1), within bounds: the weights of TRL's correction.

    Source: TRL's `vllm_importance_sampling_mode`. A token whose d_t is unknown (NaN) has the ratio 1.

    Args:
        log_ratio: (B, T), d_t = log π_old − log μ.
        loss_mask: (B, T), 1 on the tokens that count.
        mode: "token_truncate" and "sequence_truncate" cut the ratio to [`least`, `most`]; "token_mask" and
            "sequence_mask" set one outside to 0.

    Raises:
        ValueError: `mode` is none of these.
    """
    check_choice("vllm_importance_sampling_mode", mode, ENGINE_RATIOS)
    known = torch.where(loss_mask.bool(), log_ratio, 0.0).nan_to_num(nan=0.0)
    ratio = (known.sum(1, keepdim=True) if mode.startswith("sequence") else known).exp()
    if mode.endswith("truncate"):
        return ratio if least is None and most is None else ratio.clamp(least, most)
    return ratio.masked_fill(~within(ratio, least, most), 0.0)
