"""Both trainers train in bfloat16, in full and by LoRA, with each kind of critic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback

from benchmarks.critic_cost import VARIANTS
from benchmarks.critic_cycles import (
    FixedRollout,
    Sizes,
    Variant,
    build_trainer,
    save_policy,
)
from benchmarks.gpu_check.records import Check, Context
from benchmarks.small_model import build_tokenizer

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
        save_policy(sizes, policy)
        build_tokenizer(sizes.vocabulary).save_pretrained(policy)
    fields: dict[str, Any] = {
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if variant.lora:  # as with large policies: only the adapter is kept in more than 16 bits, by the optimizer
        fields["model_init_kwargs"] = {"dtype": "bfloat16"}
    trainer = build_trainer(variant, sizes, policy, FixedRollout(sizes), **{**fields, **options})
    trainer.remove_callback(PrinterCallback)
    return trainer


def trains(name: str) -> Check:
    """The variant `name` of the critics' benchmark trains in bfloat16."""
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
