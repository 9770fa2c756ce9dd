"""What the operations have in common: precision and masking."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32 where it is narrower or not floating point, and as it is where it is float32 or float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def in_precision_of(x: Tensor, bound: float | Tensor) -> float | Tensor:
    """`bound` as it is compared with `x`: a tensor rounded to the precision of `x`, as torch rounds a float."""
    return bound.to(x.dtype) if isinstance(bound, Tensor) else bound


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """`x`, in float32 or better, where `mask` is not 0, and 0 elsewhere.

    A product with the mask would let NaN and inf through (0 · inf = NaN), in the value or in the gradient. This does
    not, as long as it comes before any other arithmetic.
    """
    return torch.where(mask.bool(), at_least_float32(x), 0.0)
