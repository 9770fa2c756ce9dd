"""Losses and gradients on the device are those on the CPU, in float32 without TF32; and what our loss costs there."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.gpu_check.records import Context
from benchmarks.overhead import VARIANTS, Sizes, build, spread, step

SIZES = Sizes(hidden_size=128, layers=2, batch=8, prompt=16, turns=3, turn=16, observation=8, vocabulary=512)
SMALL = Sizes(hidden_size=64, layers=1, batch=4, prompt=4, turns=2, turn=4, observation=2, vocabulary=64)
LOSS_TOLERANCE = 1e-5
"""Largest difference of the losses."""
GRADIENT_TOLERANCE = 1e-4
"""Largest difference of a parameter's gradient, over the largest entry of any gradient."""
TIMED = Sizes(hidden_size=1024, layers=8, vocabulary=32768, turn=128)
ROUNDS = 20


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


def overhead_of_the_loss(context: Context) -> dict[str, Any]:
    """An optimizer step of each of our trainers over one of `trl.GRPOTrainer`, steps interleaved; and peak memory."""
    sizes, rounds = (SMALL, 2) if context.small else (TIMED, ROUNDS)
    trainers = {name: build(name, str(context.folder / "out"), sizes, **context.precision) for name in VARIANTS}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    memory = dict.fromkeys(trainers, 0.0)
    for number in range(1 + rounds):
        for name in list(trainers)[:: 1 if number % 2 == 0 else -1]:
            taken, memory[name] = measured_step(trainers[name], context.device)
            if number:  # the first step of each makes its optimizer's state
                seconds[name].append(taken)
    return {
        name: {
            "time_ratio": spread([a / b for a, b in zip(own, seconds["GRPO"], strict=True)]),
            "seconds": statistics.median(own),
            "step_mib": memory[name],
        }
        for name, own in seconds.items()
    }


def measured_step(trainer: Any, device: str) -> tuple[float, float]:
    """Seconds of an optimizer step, and the MiB that it needs at its peak beside what was there; 0 on a CPU."""
    if device == "cpu":
        return step(trainer), 0.0
    torch.cuda.synchronize()
    held, started = torch.cuda.memory_allocated(), time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    step(trainer)
    torch.cuda.synchronize()
    return time.perf_counter() - started, (torch.cuda.max_memory_allocated() - held) / 2**20
