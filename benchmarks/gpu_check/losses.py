"""Losses and gradients on the device are those on the CPU, in float32 without TF32."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu_check.records import Context
from benchmarks.overhead import VARIANTS, Sizes, build

SIZES = Sizes(hidden_size=128, layers=2, batch=8, prompt=16, turns=3, turn=16, observation=8, vocabulary=512)
SMALL = Sizes(hidden_size=64, layers=1, batch=4, prompt=4, turns=2, turn=4, observation=2, vocabulary=64)
LOSS_TOLERANCE = 1e-5
"""Largest difference of the losses."""
GRADIENT_TOLERANCE = 1e-4
"""Largest difference of a parameter's gradient, over the largest entry of any gradient."""


def losses_as_on_cpu(context: Context) -> dict[str, Any]:
    """Every case with the same policy and the same trajectories on both devices."""
    sizes, figures = SMALL if context.small else SIZES, {}
    torch.set_float32_matmul_precision("highest")
    for variant in VARIANTS:
        folder = str(context.folder / "out")
        # One after the other: accelerate knows one device at a time.
        loss, gradients, batch = loss_and_gradients(build(variant, folder, sizes))
        trainer = build(variant, folder, sizes, use_cpu=context.device == "cpu")
        figures[variant] = compared(loss, gradients, *loss_and_gradients(trainer, batch)[:2])
    check_equal(figures)
    return {**figures, "loss_tolerance": LOSS_TOLERANCE, "gradient_tolerance": GRADIENT_TOLERANCE}


def loss_and_gradients(
    trainer: Any, batch: dict[str, torch.Tensor] | None = None
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Of one step on `batch`, else on the trainer's own, and the batch; all on the CPU."""
    device = trainer.accelerator.device
    if batch is not None:
        trainer._prepare_inputs = lambda _: {name: tensor.to(device) for name, tensor in batch.items()}
    batch = {name: tensor.cpu() for name, tensor in trainer._prepare_inputs(None).items()}
    loss = float(trainer.training_step(trainer.model, None, None))
    gradients = {name: p.grad.cpu() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return loss, gradients, batch


def compared(
    loss: float, gradients: dict[str, torch.Tensor], other_loss: float, other: dict[str, torch.Tensor]
) -> dict[str, float]:
    """How far the device's are from the CPU's."""
    assert gradients.keys() == other.keys(), "other parameters have gradients"
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 0, "all gradients are 0: nothing is compared"
    difference = max(float((other[name] - gradient).abs().max()) for name, gradient in gradients.items())
    return {"loss": loss, "loss_difference": abs(loss - other_loss), "gradient_difference": difference / largest}


def check_equal(figures: dict[str, dict[str, float]]) -> None:
    """Raise AssertionError naming what is further off than its tolerance, or not a number."""
    for name, row in figures.items():
        for key, tolerance in (("loss_difference", LOSS_TOLERANCE), ("gradient_difference", GRADIENT_TOLERANCE)):
            assert row[key] <= tolerance, f"{name}: `{key}` is {row[key]:.3g}, more than {tolerance:g}"
