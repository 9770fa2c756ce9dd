"""What the operations have in common: precision, masking and the check of a named choice."""

from __future__ import annotations

from collections.abc import Iterable

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


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise a `ValueError` that names the argument, its value and what is allowed, unless `value` is allowed."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, but must be one of: {', '.join(map(repr, allowed))}.")
