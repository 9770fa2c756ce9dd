"""Batches of turn ids for the tests of `sorl_trl.ops`, and checks that hold for every operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

quick = settings(max_examples=40, deadline=None, derandomize=True)

# Two turns around an observation; two turns that touch and padding; no turn at all.
TURN_IDS = torch.tensor([[0, 0, -1, 1, -1], [0, 1, 1, 1, -1], [-1, -1, -1, -1, -1]])
GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)


@st.composite
def turn_id_batches(draw: st.DrawFn) -> Tensor:
    """Valid turn ids (B, T): touching turns, turns interrupted by an observation, empty rows, and T = 0 among them."""
    num_rows, length = draw(st.integers(1, 4)), draw(st.integers(0, 9))
    rows = [draw(st.lists(st.sampled_from(["gap", "same", "next"]), min_size=length, max_size=length))]
    rows += [draw(st.permutations(rows[0])) for _ in range(num_rows - 1)]
    return torch.tensor([_row(steps) for steps in rows], dtype=torch.int64).view(num_rows, length)


def _row(steps: list[str]) -> list[int]:
    ids, turn = [], -1
    for step in steps:
        if step == "next" or (step == "same" and turn < 0):
            turn += 1
        ids.append(-1 if step == "gap" else turn)
    return ids


def float64(numbers: Any) -> Tensor:
    """A tensor of Python numbers, at their own precision."""
    return torch.tensor(numbers, dtype=torch.float64)


def normal(like: Tensor, seed: int = 0, scale: float = 1.0, columns: int | None = None) -> Tensor:
    """Normal float64 numbers of the shape of `like` (B, T), or of (B, columns)."""
    shape = like.shape if columns is None else (len(like), columns)
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_blind_to_masked(op: Callable[[Tensor], Any], x: Tensor, mask: Tensor) -> None:
    """What `x` holds where `mask` is 0 changes neither the value of `op(x)` nor the gradient, which is 0 there."""
    value, gradient = _value_and_gradient(op, x)
    for garbage in GARBAGE:
        other_value, other_gradient = _value_and_gradient(op, torch.where(mask.bool(), x, garbage))
        torch.testing.assert_close(other_value, value, rtol=0, atol=0)
        torch.testing.assert_close(other_gradient, gradient, rtol=0, atol=0)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert (gradient[~mask.bool()] == 0).all()


def _value_and_gradient(op: Callable[[Tensor], Any], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    value = op(x)
    # Unequal weights, so that no gradient cancels by symmetry.
    weights = torch.arange(1, value.numel() + 1, dtype=value.dtype).view(value.shape)
    (value * weights).sum().backward()
    assert x.grad is not None
    return value.detach(), x.grad
