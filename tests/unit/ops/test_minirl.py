from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.ops import is_clipped, minirl_surrogate

from . import reference_methods as reference
from .batches import TURN_IDS, float64, normal, quick


def surrogate(log_ratio, advantages, mismatch=1.0, cap=5.0):
    stopped = is_clipped(log_ratio.detach().exp(), advantages, 0.2, 0.27)
    return minirl_surrogate(log_ratio, log_ratio.exp() * mismatch, advantages, stopped, cap)


def test_by_hand():
    log_ratio = torch.tensor([0.5, 1.26, 1.28, 9.0, 0.7, 9.0]).log().requires_grad_()
    advantages = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, 2.0])
    value = surrogate(log_ratio, advantages)
    # Below the range with A > 0 and above it with A < 0 pull, the latter with the cap for a weight.
    expected = torch.tensor([1.0, 2.52, 0.0, -10.0, 0.0, 0.0])
    torch.testing.assert_close(value, expected)
    (gradient,) = torch.autograd.grad(value.sum(), log_ratio)
    torch.testing.assert_close(gradient, expected)


@quick
@given(st.floats(0.01, 9), st.floats(0.01, 9), st.floats(-3, 3), st.floats(0.5, 9))
def test_value_and_gradient_equal_the_reference(ratio, mismatch, advantage, cap):
    log_ratio = float64([ratio]).log().requires_grad_()
    value = surrogate(log_ratio, float64([advantage]), mismatch, cap)
    expected = reference.minirl(log_ratio.exp().item(), mismatch, advantage, (0.2, 0.27), cap)
    (gradient,) = torch.autograd.grad(value.sum(), log_ratio)
    assert (value.item(), gradient.item()) == (pytest.approx(expected), pytest.approx(expected))


def test_the_mismatch_multiplies_in_before_the_cap():
    log_ratio = torch.zeros(1, requires_grad=True)
    assert surrogate(log_ratio, torch.ones(1), mismatch=4.0).item() == 4.0
    assert surrogate(log_ratio, torch.ones(1), mismatch=40.0).item() == 5.0


def test_weights_have_no_gradient():
    weights = torch.ones(2, requires_grad=True)
    value = minirl_surrogate(torch.zeros(2, requires_grad=True), weights, torch.ones(2), torch.zeros(2).bool(), 5.0)
    assert torch.autograd.grad(value.sum(), weights, allow_unused=True) == (None,)


def test_half_precision_becomes_float32():
    value = surrogate(normal(TURN_IDS).bfloat16(), normal(TURN_IDS, 1).half())
    assert value.dtype == torch.float32
