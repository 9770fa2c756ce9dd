"""C(θ), the gradient that clipping removed: how it is added up over micro-batches and ranks, and what it divides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from sorl_trl.methods import ClipRange, MicroBatch, Objective
from sorl_trl.ops import turn_layout
from sorl_trl.trainers.bias_norm import ClippingBiasNormalizer


def one() -> Accelerator:
    """Not at import: a test before this one may have reset accelerate's state."""
    return Accelerator(cpu=True)


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def rank(others: ClippingBiasNormalizer) -> Any:
    """An accelerator of two processes, of which the other one has `others`."""

    def reduce(values: Tensor, reduction: str) -> Tensor:
        told = others._gradients is not None
        other = torch.tensor(float(told)) if reduction == "sum" else torch.zeros_like(values)
        if told and reduction == "mean":
            other = torch.cat([each.reshape(-1) for each in others._gradients])
        return (values + other) / (1 if reduction == "sum" else 2)

    return SimpleNamespace(device=torch.device("cpu"), reduce=reduce)


def test_hand_worked_over_two_micro_batches() -> None:
    """C is (1, 4) + (2, 0) = (3, 4), of norm 5; then it is forgotten."""
    weights = parameter(1.0, 1.0)
    normalizer = ClippingBiasNormalizer([weights])
    normalizer.add(weights[0] + 4 * weights[1])
    normalizer.add(2 * weights[0])
    assert weights.grad is None  # the second backward stays out of the optimizer's gradient
    weights.grad = torch.tensor([10.0, -5.0], dtype=torch.float64)
    assert normalizer.normalize(one()) == pytest.approx(5.0)
    assert weights.grad.tolist() == pytest.approx([2.0, -1.0])
    assert normalizer.normalize(one()) == 0.0
    assert weights.grad.tolist() == pytest.approx([2.0, -1.0])


@pytest.mark.parametrize(("of_other", "norm"), [((0.0, 8.0), 5.0), (None, 3.0)], ids=str)
def test_two_ranks_divide_by_the_norm_of_their_mean(of_other: tuple[float, float] | None, norm: float) -> None:
    """(6, 0) with (0, 8) is (3, 4) in the mean, and (3, 0) with a rank where nothing is clipped."""
    weights = parameter(1.0, 1.0)
    normalizer, other = ClippingBiasNormalizer([weights]), ClippingBiasNormalizer([weights])
    normalizer.add(6 * weights[0])
    if of_other is not None:
        other.add(of_other[0] * weights[0] + of_other[1] * weights[1])
    weights.grad = torch.tensor([norm, 2 * norm], dtype=torch.float64)
    assert normalizer.normalize(rank(other)) == pytest.approx(norm)
    assert weights.grad.tolist() == pytest.approx([1.0, 2.0])


def test_the_rank_where_nothing_is_clipped_divides_too() -> None:
    weights = parameter(1.0)
    idle, other = ClippingBiasNormalizer([weights]), ClippingBiasNormalizer([weights])
    other.add(8 * weights.sum())
    weights.grad = torch.tensor([1.0], dtype=torch.float64)
    assert idle.normalize(rank(other)) == pytest.approx(4.0)
    assert weights.grad.tolist() == pytest.approx([0.25])


def test_a_norm_below_one_divides_nothing() -> None:
    weights = parameter(1.0)
    normalizer = ClippingBiasNormalizer([weights])
    normalizer.add(0.5 * weights.sum())
    weights.grad = torch.tensor([3.0], dtype=torch.float64)
    assert normalizer.normalize(one()) == pytest.approx(0.5)
    assert weights.grad.tolist() == [3.0]


def test_the_norm_is_that_of_all_parameters() -> None:
    """Those that C does not depend on count as 0 and are divided too; frozen ones and those without .grad not."""
    first, second, apart, unused = (parameter(1.0) for _ in range(4))
    frozen = parameter(1.0).requires_grad_(False)
    normalizer = ClippingBiasNormalizer([first, second, apart, unused, frozen])
    normalizer.add((6 * first + 8 * second).sum() * frozen.sum())
    for each in (first, second, apart):
        each.grad = torch.ones_like(each)
    assert normalizer.normalize(one()) == pytest.approx(10.0)
    assert [each.grad.item() for each in (first, second, apart)] == pytest.approx([0.1] * 3)
    assert unused.grad is None
    assert frozen.grad is None


def observed(weights: nn.Parameter, stopped: list[bool], is_training: bool = True) -> ClippingBiasNormalizer:
    """One of two micro-batches: two trajectories of two tokens and of one, of advantages 3 and -1."""
    turns, none = turn_layout(torch.tensor([[0, 0], [0, -1]])), ClipRange(0.2, 0.2)
    log_ratio = torch.stack([weights[:2], weights[2:]])
    batch = MicroBatch(
        logps=log_ratio, old_logps=log_ratio, sampling_logps=log_ratio, log_ratio=log_ratio, turns=turns,
        advantages=torch.tensor([[3.0], [-1.0]], dtype=torch.float64), level="token", turn_ratio="geometric",
        token_range=none, turn_range=none, clip_range=none, is_training=is_training,
    )  # fmt: skip
    normalizer = ClippingBiasNormalizer([weights])
    trainer: Any = SimpleNamespace(args=SimpleNamespace(async_staleness=0), use_vllm=False, _micro_batches=lambda: 2.0)
    normalizer.observe(trainer, batch, Objective(log_ratio, torch.tensor(stopped).view(2, 2)))
    return normalizer


def test_a_micro_batch_adds_what_clipping_removed() -> None:
    """mean_i (1/|y_i|) Σ_{t clipped} w_t Â_t, halved by its two micro-batches; the last position is no token."""
    weights = parameter(0.5, 0.1, -0.4, 9.0)
    (found,) = observed(weights, [True, False, True, True])._gradients or []
    w = weights.detach().exp()
    expected = torch.stack([w[0] * 3 / 2, w[1] * 0, -w[2], w[3] * 0]) / 2 / 2
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", ["nothing is stopped", "evaluation", "no gradient"])
def test_nothing_is_added(how: str) -> None:
    """What evaluation leaves behind would enter the next training step."""
    weights = parameter(0.5, 0.1, -0.4, 0.0)
    with torch.set_grad_enabled(how != "no gradient"):
        stopped = [how != "nothing is stopped", False, False, True]
        assert observed(weights, stopped, is_training=how != "evaluation")._gradients is None
