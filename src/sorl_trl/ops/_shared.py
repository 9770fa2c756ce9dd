"""What the operations have in common: precision, masking and segments."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32 where it is narrower or not floating point, and as it is where it is float32 or float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """`x`, in float32 or better, where `mask` is not 0, and 0 elsewhere.

    A product with the mask would let NaN and inf through (0 · inf = NaN), in the value or in the gradient. This does
    not, as long as it comes before any other arithmetic.
    """
    return torch.where(mask.bool(), at_least_float32(x), 0.0)


def turn_slots(turn_ids: Tensor) -> tuple[Tensor, int]:
    """Where each token goes in a (B, K + 1) table of turns, and K: tokens of no turn go to the spare last column."""
    num_turns = int(turn_ids.max()) + 1 if turn_ids.numel() else 0
    return torch.where(turn_ids < 0, num_turns, turn_ids), num_turns
