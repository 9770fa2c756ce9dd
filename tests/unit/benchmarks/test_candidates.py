"""What the benchmark's candidates compute."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from benchmarks.candidates import COEF_RANGE, following, masked
from torch import Tensor

from sorl_trl.trainers.loss.micro_batch import ClipRange


@pytest.mark.parametrize(
    ("coef", "kl", "expected"),
    [
        (1.0, 0.021, 1.5),
        (1.0, 0.019, 1.0),
        (1.0, 0.006, 1.0),
        (1.5, 0.004, 1.0),
        (1.0, 0.0, 1.0),
        (COEF_RANGE[1], 1.0, COEF_RANGE[1]),
        (COEF_RANGE[0], 1e-6, COEF_RANGE[0]),
    ],
)
def test_the_coefficient_follows_the_kl(coef: float, kl: float, expected: float) -> None:
    assert following(coef, kl, target=0.01) == pytest.approx(expected)


@pytest.mark.parametrize("low", [0.2, torch.tensor([[0.2, 0.2, 0.2, 0.05]])])
def test_units_outside_keep_their_value_and_have_no_gradient(low: float | Tensor) -> None:
    def own(log_ratio: Tensor, clip_range: ClipRange) -> tuple[Tensor, Tensor]:
        ratio = log_ratio.exp()
        return 3 * ratio, ratio

    log_ratio = torch.tensor([[0.7, 1.0, 1.3, 0.9]]).log().requires_grad_()
    of_tokens, ratio = masked(partial(own, clip_range=ClipRange(low, 0.2)))(log_ratio)
    of_tokens.sum().backward()
    torch.testing.assert_close(of_tokens, 3 * ratio)
    torch.testing.assert_close(ratio, torch.tensor([[0.7, 1.0, 1.3, 0.9]]))
    last = 2.7 if isinstance(low, float) else 0.0
    assert log_ratio.grad is not None
    torch.testing.assert_close(log_ratio.grad, torch.tensor([[0.0, 3.0, 0.0, last]]))
