"""The clip range of a ratio that averages over many tokens: narrower, the more there are. Ours, no part of SORL."""

from __future__ import annotations

import torch
from torch import Tensor

from sorl_trl.checks import check_choice

from ._shared import at_least_float32, in_precision_of
from .importance import IMPORTANCE_SAMPLING_LEVELS
from .layout import TurnLayout, turn_layout
from .masking import turn_broadcast, turn_reduce

_EXPONENTS = {"none": 0.0, "sqrt_length": 0.5, "length": 1.0}
CLIP_RANGE_SCALINGS = tuple(_EXPONENTS)
"""By which power of its tokens a unit's range is divided: 0, 1/2 or 1."""
LONGEST = 500
"""Tokens of a unit beyond which "length" narrows its range no further: 0.2/500 is 4e-4, what GSPO's authors clip at in
responses of thousands of tokens. What 0.2/n does beyond 350 tokens has not been measured."""


def unit_lengths(turn_ids: Tensor | TurnLayout, level: str) -> Tensor:
    """Count the model tokens of the unit that each token belongs to: (B, T) int64, with 1 where `turn_ids` is −1.

    Args:
        turn_ids: (B, T) int64, the turn of each model token, −1 elsewhere.
        level: "token", whose units have one token; "turn", |y^k|; or "sequence", |y_i| over all turns.

    Raises:
        ValueError: `level` is not one of the above.
    """
    check_choice("level", level, IMPORTANCE_SAMPLING_LEVELS)
    turns = turn_layout(turn_ids)
    if level == "token":
        return torch.ones_like(turns.turn_ids)
    of_sequence = turns.loss_mask.sum(dim=1, keepdim=True)
    lengths = turn_broadcast(turns.lengths, turns).long() if level == "turn" else of_sequence
    return torch.where(turns.loss_mask, lengths, 1)


def scaled_clip_range(epsilon: float | Tensor, turn_ids: Tensor | TurnLayout, level: str, scaling: str) -> Tensor:
    """Divide ε by a power of the unit's tokens, ε_k = ε / |y^k|^p: (B, T), with ε itself where `turn_ids` is −1.

    With p = 1, a unit of more than `LONGEST` tokens has the range of one of `LONGEST`.

    Source: ours. A mean over n tokens moves by 1/n as far as one of its tokens that moves alone, and by 1/√n as far
    where all move at random; ε keeps one meaning, that of a token's ratio, at every n. docs/paper_to_code.md derives
    which p fits which ratio.

    Args:
        epsilon: ε, how far the ratio of a unit of one token may go, whose range it is exactly. A float, or what
            broadcasts to (B, T).
        turn_ids: (B, T) int64, the turn of each model token, −1 elsewhere.
        level: "token", "turn" or "sequence", the unit, as in `unit_lengths`.
        scaling: p. "none": 0; "sqrt_length": 1/2; "length": 1.

    The result is float64, so that 1 ± ε_k rounds once, when it is compared with a ratio (float32 on MPS, which has no
    float64).

    Raises:
        ValueError: `level` or `scaling` is not one of the above.
    """
    check_choice("scaling", scaling, CLIP_RANGE_SCALINGS)
    lengths = unit_lengths(turn_ids, level)
    if scaling == "length":
        lengths = lengths.clamp(max=LONGEST)
    return epsilon / lengths.to(_widest(lengths.device)) ** _EXPONENTS[scaling]


def scaled_bound(delta: float | Tensor, turn_ids: Tensor | TurnLayout, level: str, scaling: str) -> Tensor:
    """Scale the distance of δ from 1 as the range is, 1 + (δ − 1) / |y^k|^p: (B, T), with δ where `turn_ids` is −1.

    Source: ours. A bound of 4 on the mean of a hundred token ratios would bound nothing. Arguments and errors are as
    with `scaled_clip_range`.
    """
    return 1 + scaled_clip_range(delta - 1, turn_ids, level, scaling)


def is_outside(ratio: Tensor, epsilon_low: float | Tensor, epsilon_high: float | Tensor) -> Tensor:
    """Find the ratios below 1 − ε_low or above 1 + ε_high: elementwise, bool, and False where one is NaN.

    `epsilon_low` and `epsilon_high` are floats or broadcast to `ratio`.
    """
    ratio = at_least_float32(ratio)
    return (ratio < in_precision_of(ratio, 1 - epsilon_low)) | (ratio > in_precision_of(ratio, 1 + epsilon_high))


def range_of_turns(epsilon: float | Tensor, turns: TurnLayout) -> float | Tensor:
    """Take one ε per turn, (B, K), from one per token, (B, T) or what broadcasts to it; a float stays one."""
    if not isinstance(epsilon, Tensor):
        return epsilon
    return turn_reduce(epsilon.expand(turns.turn_ids.shape), turns)


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
