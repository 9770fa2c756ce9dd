"""How far the engine that sampled is from the trainer's old policy, from the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sorl_trl.ops import bounded_log_ratio


def mismatch_log_ratio(batch: Mapping[str, Any]) -> Tensor:
    """(B, T) d_t = log π_old − log μ of each model token, bounded; 0 where it is NaN, and off the model tokens.

    An end of sequence that was appended is no model token: the engine has not sampled it.

    Args:
        batch: with `turn_ids`, `old_per_token_logps` and `sampling_per_token_logps`.
    """
    difference = batch["old_per_token_logps"] - batch["sampling_per_token_logps"]
    known = (batch["turn_ids"] >= 0) & ~difference.isnan()
    return bounded_log_ratio(torch.where(known, difference, 0.0))


def minirl_weights(ratio: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """(B, T) by what MiniRL weighs each token, before the cap: `ratio` (B, T), times that to vLLM where it corrects.

    Args:
        ratio: of the policy to the old policy.
        batch: as TRL makes it, with an `importance_sampling_ratio` where vLLM's log-probabilities are corrected.
    """
    return ratio * mismatch_log_ratio(batch).exp() if "importance_sampling_ratio" in batch else ratio
