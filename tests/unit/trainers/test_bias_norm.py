"""C(θ), the gradient that clipping removed: how it is added up, when, and what it divides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from sorl_trl.trainers.loss.bias_norm import ClippingBiasNormalizer
from tests.losses import EPSILON, gradient, off_policy_batch, token_logps

pytestmark = pytest.mark.trains


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


class TestNormalizer:
    def test_hand_worked(self) -> None:
        """The micro-batches' C is (1, 4) + (2, 0) = (3, 4), of norm 5; then it is forgotten."""
        weights = parameter(1.0, 1.0)
        normalizer = ClippingBiasNormalizer([weights])
        normalizer.add(weights[0] + 4 * weights[1], any_clipped=True)
        normalizer.add(2 * weights[0], any_clipped=True)
        assert weights.grad is None  # the second backward stays out of the optimizer's gradient
        weights.grad = torch.tensor([10.0, -5.0])
        assert normalizer.normalize(Accelerator(cpu=True)) == pytest.approx(5.0)
        assert weights.grad.tolist() == pytest.approx([2.0, -1.0])
        assert normalizer.normalize(Accelerator(cpu=True)) == 0.0
        assert weights.grad.tolist() == pytest.approx([2.0, -1.0])

    def test_a_norm_below_one_divides_nothing(self) -> None:
        weights = parameter(1.0)
        normalizer = ClippingBiasNormalizer([weights])
        normalizer.add(0.5 * weights.sum(), any_clipped=True)
        weights.grad = torch.tensor([3.0])
        assert normalizer.normalize(Accelerator(cpu=True)) == pytest.approx(0.5)
        assert weights.grad.tolist() == [3.0]

    def test_nothing_clipped_takes_no_second_backward(self) -> None:
        normalizer = ClippingBiasNormalizer([parameter(1.0)])
        normalizer.add(torch.tensor(1.0), any_clipped=False)  # has no graph: differentiating it would fail
        assert normalizer.normalize(Accelerator(cpu=True)) == 0.0

    def test_the_norm_is_that_of_all_parameters(self) -> None:
        """Those that C does not depend on count as 0 and are divided too; frozen ones and those without .grad not."""
        first, second, apart, unused = parameter(1.0), parameter(1.0), parameter(1.0), parameter(1.0)
        frozen = parameter(1.0).requires_grad_(False)
        normalizer = ClippingBiasNormalizer([first, second, apart, unused, frozen])
        normalizer.add((6 * first + 8 * second).sum() * frozen.sum(), any_clipped=True)
        for each in (first, second, apart):
            each.grad = torch.tensor([1.0])
        assert normalizer.normalize(Accelerator(cpu=True)) == pytest.approx(10.0)
        assert [each.grad.item() for each in (first, second, apart)] == pytest.approx([0.1] * 3)
        assert unused.grad is None
        assert frozen.grad is None


def bias_batch(tmp_path: Path, tokenizer: Any, level: str = "turn") -> tuple[Any, dict[str, Any]]:
    return off_policy_batch(
        tmp_path, tokenizer, clip_normalization="bias_norm", num_iterations=2, importance_sampling_level=level
    )


def units(turn_ids: Tensor, level: str) -> list[list[int]]:
    """The positions of one trajectory that share a ratio."""
    tokens = torch.nonzero(turn_ids >= 0).flatten().tolist()
    if level == "sequence":
        return [tokens]
    if level == "token":
        return [[t] for t in tokens]
    return [[t for t in tokens if turn_ids[t] == k] for k in range(int(turn_ids.max()) + 1)]


def reference_bias(trainer: Any, batch: dict[str, Any], level: str) -> Tensor:
    """The gradient of mean_i (1/|y_i|) Σ_{t clipped} w_t Â_t, unit by unit."""
    log_ratio = token_logps(trainer, batch) - batch["old_per_token_logps"]
    total = torch.zeros((), dtype=torch.float64)
    clipped = 0
    for i, advantage in enumerate(batch["advantages"].tolist()):
        trained = int((batch["turn_ids"][i] >= 0).sum())
        for unit in units(batch["turn_ids"][i], level):
            ratio = log_ratio[i, unit].mean().exp()
            if (advantage > 0 and ratio > 1 + EPSILON) or (advantage < 0 and ratio < 1 - EPSILON):
                clipped += 1
                total = total + ratio * advantage * len(unit) / trained
    assert clipped > 1
    return gradient(total / len(log_ratio), trainer)


def accumulated(trainer: Any) -> Tensor:
    return torch.cat([g.flatten() for g in trainer._bias_normalizer._gradients]).double()


class TestTrainer:
    @pytest.mark.parametrize("level", ["token", "turn", "sequence"])
    def test_every_level_clips_its_own_ratio(self, tmp_path: Path, tokenizer: Any, level: str) -> None:
        trainer, batch = bias_batch(tmp_path, tokenizer, level)
        trainer._compute_loss(trainer.model, batch)
        torch.testing.assert_close(accumulated(trainer), reference_bias(trainer, batch, level), rtol=0, atol=1e-6)

    def test_micro_batches_are_averaged(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer, batch = bias_batch(tmp_path, tokenizer)
        expected = reference_bias(trainer, batch, "turn")
        trainer.current_gradient_accumulation_steps = 2
        for half in (slice(0, 4), slice(4, 8)):
            rows = {key: value[half] if value.dim() else value for key, value in batch.items()}
            trainer._compute_loss(trainer.model, rows)
        torch.testing.assert_close(accumulated(trainer), expected, rtol=0, atol=1e-6)

    def test_evaluation_adds_nothing(self, tmp_path: Path, tokenizer: Any) -> None:
        """Also with gradients on: what evaluation leaves behind would enter the next training step."""
        trainer, batch = bias_batch(tmp_path, tokenizer)
        trainer.model.eval()
        assert trainer._compute_loss(trainer.model, batch).requires_grad
        assert trainer._bias_normalizer._gradients is None

    def test_without_gradients_there_is_no_bias(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer, batch = bias_batch(tmp_path, tokenizer)
        with torch.no_grad():
            loss = trainer._compute_loss(trainer.model, batch)
        assert loss.isfinite()
        assert trainer._bias_normalizer._gradients is None
