"""The mathematics of SORL as pure functions: tensors and floats in, tensors out.

Each is differentiable where it should be, reduces in float32 or better, and sees nothing of what masked positions
hold, NaN and infinity included.
"""

from .advantages import (
    explained_variance,
    group_turn_advantages,
    token_gae,
    turn_gae,
    turn_returns,
    turn_rewards_to_tokens,
    turn_std,
    whiten,
)
from .clip_norm import (
    KL_ESTIMATORS,
    PENALTY_GATES,
    clip_fraction,
    clip_penalty,
    clipping_bias,
    gated_kl,
    is_clipped,
    kl_to_old,
    turn_clip_fraction,
)
from .clip_range import CLIP_RANGE_SCALINGS, is_outside, range_of_turns, scaled_bound, scaled_clip_range, unit_lengths
from .importance import (
    IMPORTANCE_SAMPLING_LEVELS,
    LOG_RATIO_BOUND,
    TURN_RATIOS,
    bounded_log_ratio,
    importance_ratio,
    log_importance_ratio,
    with_own_gradients,
)
from .layout import TurnLayout, turn_layout
from .losses import aggregate_turns, clipped_surrogate, is_value_clipped, turn_weights, value_loss
from .masking import (
    last_token_before_turn,
    masked_mean,
    split_turns_after,
    turn_broadcast,
    turn_counts,
    turn_ends,
    turn_ids_from_mask,
    turn_mask,
    turn_reduce,
    turn_starts,
    validate_turn_ids,
)

__all__ = [
    "CLIP_RANGE_SCALINGS",
    "IMPORTANCE_SAMPLING_LEVELS",
    "KL_ESTIMATORS",
    "LOG_RATIO_BOUND",
    "PENALTY_GATES",
    "TURN_RATIOS",
    "TurnLayout",
    "aggregate_turns",
    "bounded_log_ratio",
    "clip_fraction",
    "clip_penalty",
    "clipped_surrogate",
    "clipping_bias",
    "explained_variance",
    "gated_kl",
    "group_turn_advantages",
    "importance_ratio",
    "is_clipped",
    "is_outside",
    "is_value_clipped",
    "kl_to_old",
    "last_token_before_turn",
    "log_importance_ratio",
    "masked_mean",
    "range_of_turns",
    "scaled_bound",
    "scaled_clip_range",
    "split_turns_after",
    "token_gae",
    "turn_broadcast",
    "turn_clip_fraction",
    "turn_counts",
    "turn_ends",
    "turn_gae",
    "turn_ids_from_mask",
    "turn_layout",
    "turn_mask",
    "turn_reduce",
    "turn_returns",
    "turn_rewards_to_tokens",
    "turn_starts",
    "turn_std",
    "turn_weights",
    "unit_lengths",
    "validate_turn_ids",
    "value_loss",
    "whiten",
    "with_own_gradients",
]
