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


def check_groups(num_generations: int, rows: int, what: str) -> None:
    """Raise ValueError unless `num_generations` divides the number of `rows`; `what` they are."""
    if num_generations < 1 or rows % num_generations:
        raise ValueError(
            f"num_generations is {num_generations}, but must be positive and divide the number of {what}, which is "
            f"{rows}."
        )


def centred_within(x: Tensor, mask: Tensor, index: Tensor) -> Tensor:
    """`x` less the mean of the kept entries that have the same `index`, 0 where `mask` is 0."""
    count = count_within(mask, index)
    centred = keep(x, mask)
    # The second pass removes what rounding left of the mean of equal entries, which 1 / (σ + 1e-4) would blow up.
    for _ in range(2):
        centred = keep(centred - sums_within(centred, index) / count.clamp(min=1), mask)
    return centred


def spread_within(centred: Tensor, mask: Tensor, index: Tensor) -> Tensor:
    """The unbiased standard deviation of the entries that have the same `index`, for each entry."""
    variance = sums_within(centred.square(), index) / (count_within(mask, index) - 1).clamp(min=1)
    is_positive = variance > 0  # the square root of 0 has no gradient
    return torch.where(is_positive, torch.where(is_positive, variance, 1.0).sqrt(), 0.0)


def count_within(mask: Tensor, index: Tensor) -> Tensor:
    """How many kept entries have the same `index`, for each entry."""
    return sums_within(mask.bool().long(), index)


def sums_within(x: Tensor, index: Tensor) -> Tensor:
    """The sum of `x` over all entries that have the same `index`, for each entry: the shape of `x`."""
    flat, index_flat = x.reshape(-1), index.reshape(-1)
    return torch.zeros_like(flat).scatter_add(0, index_flat, flat).gather(0, index_flat).view(x.shape)
