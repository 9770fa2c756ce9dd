"""The gate of the clipping-triggered KL penalty, as the config asks for it."""

from __future__ import annotations

from torch import Tensor

from sorl_trl.ops import clip_fraction, turn_clip_fraction
from sorl_trl.trainers.base_config import TurnLevelConfig


def penalty_gate(
    log_ratio: Tensor, turn_ids: Tensor, args: TurnLevelConfig, clip_range: tuple[float, float]
) -> Tensor:
    """(B,) what weighs each trajectory's KL: its share of tokens or turns outside the gate's range, or 1.

    Args:
        log_ratio: (B, T) of tokens.
        turn_ids: (B, T) int64.
        args: `ctn_gate`, `ctn_epsilon`, `ctn_epsilon_high` and `turn_ratio` are read.
        clip_range: (epsilon_low, epsilon_high) of the surrogate, for the sides of the gate's range that are not set.
    """
    low = clip_range[0] if args.ctn_epsilon is None else args.ctn_epsilon
    high = clip_range[1] if args.ctn_epsilon_high is None else args.ctn_epsilon_high
    if args.ctn_gate == "token":
        return clip_fraction(log_ratio, turn_ids >= 0, low, high)
    if args.ctn_gate == "turn":
        return turn_clip_fraction(log_ratio, turn_ids, low, high, args.turn_ratio)
    return log_ratio.new_ones(len(log_ratio))
