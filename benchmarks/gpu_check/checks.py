"""What one process checks: both trainers train in bfloat16, and losses and gradients are those on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback

from benchmarks import overhead
from benchmarks.common import build_model, build_tokenizer
from benchmarks.fixed_lengths import VARIANTS, Sizes, Variant, build_trainer


class Skipped(Exception):
    """Something that the check needs is missing; the message names it."""


@dataclass(frozen=True)
class Context:
    """Where a check runs: on "cuda" or "cpu", with a folder of its own."""

    device: str
    folder: Path
    other_gpu: str | None = None
    """A second one, as `CUDA_VISIBLE_DEVICES` names it, which this process does not see."""

    @property
    def small(self) -> bool:
        """Whether to take sizes that a CPU goes through in seconds."""
        return self.device == "cpu"

    @property
    def precision(self) -> dict[str, Any]:
        """Fields of a trainer's config: in bfloat16, on this device."""
        return {"use_cpu": self.device == "cpu", "bf16": True}


Check = Callable[[Context], dict[str, Any]]
"""Returns its figures. Raises `Skipped`, or anything else where it fails."""


STEPS = 4
"""Optimizer steps, two on each rollout."""
SIZES = Sizes(hidden_size=512, layers=4, batch=8, turns=3, turn=16, observation=8)
SMALL = Sizes(hidden_size=64, layers=1, batch=4, prompt=4, turns=2, turn=4, observation=2, vocabulary=64, lora_rank=2)


def sizes_of(context: Context) -> Sizes:
    return SMALL if context.small else SIZES


def build(variant: Variant, sizes: Sizes, folder: Path, **options: Any) -> Any:
    """A trainer of `STEPS` steps on a random policy, which it writes into `folder` with its tokenizer."""
    policy = folder / "policy"
    if not policy.exists():
        build_model(sizes.hidden_size, sizes.layers, sizes.vocabulary).save_pretrained(policy)
        build_tokenizer(sizes.vocabulary).save_pretrained(policy)
    fields: dict[str, Any] = {
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
    }
    if variant.lora:  # as with large policies: only the adapter is kept in more than 16 bits, by the optimizer
        fields["model_init_kwargs"] = {"dtype": "bfloat16"}
    trainer = build_trainer(variant, sizes, policy, **{**fields, **options})
    trainer.remove_callback(PrinterCallback)
    return trainer


def trains(name: str) -> Check:
    """The variant `name` trains in bfloat16."""
    variant = VARIANTS[name]

    def check(context: Context) -> dict[str, Any]:
        trainer = build(variant, sizes_of(context), context.folder, **context.precision)
        before = trainable(trainer.model)
        elsewhere = {str(p.device) for p in trainer.model.parameters() if p.device.type != context.device}
        assert not elsewhere, f"parameters are on {elsewhere}, not on {context.device}"
        trainer.train()
        assert trainer._forward.reason is None, f"the policy reads padded rows: {trainer._forward.reason}"
        figures = training_figures(trainer.state.log_history)
        check_moved(before, trainable(trainer.model), critic=variant.critic is not None)
        return figures

    return check


def trainable(model: Any) -> dict[str, torch.Tensor]:
    """Copies, to compare with later."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def training_figures(log_history: list[dict[str, Any]]) -> dict[str, Any]:
    """What the steps logged.

    Raises:
        AssertionError: a step is missing, its loss or gradient is no number, or the policy has not moved.
    """
    steps = [entry for entry in log_history if "grad_norm" in entry]
    assert len(steps) == STEPS, f"{len(steps)} steps were logged, not {STEPS}"
    figures = {name: [entry[name] for entry in steps] for name in ("loss", "grad_norm", "kl_to_old")}
    for name, values in figures.items():
        assert all(map(math.isfinite, values)), f"`{name}` is {values}"
    assert figures["kl_to_old"][1] > 0, "the policy did not move between two updates of one rollout"
    return figures


def check_moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], critic: bool) -> None:
    """Raise AssertionError unless the policy has moved, and so has the critic where there is one."""
    moved = [name for name, weight in after.items() if not torch.equal(weight, before[name].to(weight.device))]
    assert any("critic" not in name for name in moved), "no weight of the policy has moved"
    assert not critic or any("critic" in name for name in moved), "no weight of the critic has moved"


COMPARED = {
    True: overhead.of_loss({"hidden_size": 64, "layers": 1, "vocabulary": 64}, 4, 4, 2, rows=4),
    False: overhead.of_loss({"hidden_size": 128, "layers": 2, "vocabulary": 512}, 16, 16, 8),
}
"""Whether small, to the policy and the trajectories whose losses are compared."""
LOSS_TOLERANCE = 1e-5
"""Largest difference of the losses."""
GRADIENT_TOLERANCE = 1e-4
"""Largest difference of a parameter's gradient, over the largest entry of any gradient."""


def losses_as_on_cpu(context: Context) -> dict[str, Any]:
    """Every case with the same policy and the same trajectories on both devices."""
    sizes, figures = COMPARED[context.small], {}
    torch.set_float32_matmul_precision("highest")
    for variant in overhead.VARIANTS:
        folder = str(context.folder / "out")
        # One after the other: accelerate knows one device at a time.
        loss, gradients, batch = loss_and_gradients(overhead.build(variant, folder, sizes))
        trainer = overhead.build(variant, folder, sizes, use_cpu=context.device == "cpu")
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
