from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.ops import (
    KL_ESTIMATORS,
    clip_fraction,
    clipped_surrogate,
    clipping_bias,
    gated_kl,
    is_clipped,
    kl_at_rest,
    kl_to_old,
    kl_to_reference,
    masked_mean,
)

from .batches import TURN_IDS, normal, quick, turn_id_batches

MASK = TURN_IDS >= 0
LOG_RATIO = torch.tensor([[1.5, 1.1, 9.0, 0.5, 9.0], [0.9, 1.0, 1.1, 1.1, 9.0], [9.0] * 5]).log()
every_estimator = pytest.mark.parametrize("estimator", KL_ESTIMATORS)


def test_clip_fraction_by_hand():
    torch.testing.assert_close(clip_fraction(LOG_RATIO, MASK, 0.2, 0.2), torch.tensor([2 / 3, 0.0, 0.0]))
    torch.testing.assert_close(clip_fraction(LOG_RATIO, MASK, 0.6, 0.05), torch.tensor([2 / 3, 0.5, 0.0]))


class TestKlToOld:
    @pytest.mark.parametrize(
        ("estimator", "expected"),
        [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", math.log(2) - 0.5), ("unbiased", math.log(4) - 1)],
    )
    def test_by_hand(self, estimator, expected):
        log_ratio = torch.tensor([[math.log(2), 0.0, 7.0], [7.0, 7.0, 7.0]])
        mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
        torch.testing.assert_close(kl_to_old(log_ratio, mask, estimator), torch.tensor([expected / 2, 0.0]))

    @every_estimator
    @pytest.mark.parametrize(("beyond", "bound"), [(95.0, 20.0), (math.inf, 20.0), (-math.inf, -20.0)])
    def test_a_log_ratio_beyond_the_bound_counts_as_the_bound_and_has_no_gradient(self, estimator, beyond, bound):
        log_ratio = torch.tensor([[beyond, 0.5]], requires_grad=True)
        kl = kl_to_old(log_ratio, torch.ones(1, 2), estimator)
        kl.sum().backward()
        torch.testing.assert_close(kl.detach(), kl_to_old(torch.tensor([[bound, 0.5]]), torch.ones(1, 2), estimator))
        assert log_ratio.grad[0, 0] == 0
        assert log_ratio.grad[0, 1] != 0


def test_the_kl_to_the_reference_by_hand() -> None:
    """The reference is twice as likely, half as likely, or masked."""
    logps, reference = torch.zeros(1, 3), torch.tensor([[math.log(2), -math.log(2), math.nan]])
    expected = torch.tensor([[1 - math.log(2), math.log(2) - 0.5, 0.0]])
    torch.testing.assert_close(kl_to_reference(logps, reference, torch.tensor([[1, 1, 0]])), expected)


def test_the_kl_at_rest_by_hand() -> None:
    """The first value, then a tenth of the way to each new one; NaN is no value."""
    assert kl_at_rest(math.nan, 0.2) == 0.2
    assert kl_at_rest(0.2, 0.1) == pytest.approx(0.19)
    assert kl_at_rest(0.2, math.nan) == 0.2
    assert math.isnan(kl_at_rest(math.nan, math.nan))


def test_a_closed_gate_stops_value_and_gradient_even_of_nan():
    log_ratio = torch.tensor([[500.0, math.nan], [0.5, 0.5]], requires_grad=True)
    gated = gated_kl(torch.tensor([0.0, 1.0]), log_ratio, torch.ones(2, 2))
    gated.sum().backward()
    assert gated[0] == 0
    assert log_ratio.grad[0].tolist() == [0.0, 0.0]
    assert (log_ratio.grad[1] > 0).all()


@quick
@given(turn_id_batches(), st.integers(0, 99))
def test_the_bias_is_what_clipping_removes_from_the_gradient(turn_ids, seed):
    mask, advantages = turn_ids >= 0, normal(turn_ids, seed + 1)
    log_ratio = normal(turn_ids, seed, scale=0.4).requires_grad_()
    ratio = log_ratio.exp()
    losses = [ratio * advantages, clipped_surrogate(ratio, advantages, 0.2, 0.28)]
    full, clipped = (masked_mean(x, mask, dim=1).mean() for x in losses)
    bias = clipping_bias(ratio, advantages, is_clipped(ratio, advantages, 0.2, 0.28), mask)
    (gradient,) = torch.autograd.grad(full - clipped, log_ratio, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(bias, log_ratio)[0], gradient, rtol=1e-10, atol=1e-12)
