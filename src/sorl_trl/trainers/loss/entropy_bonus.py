"""The entropy bonus of TRL's GRPO, for the loss of this package: fixed, or following a target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def entropy_bonus(trainer: Any, entropies: Tensor, mask: Tensor) -> Tensor:
    """What is taken off a micro-batch's loss: the coefficient times the mean entropy of its tokens.

    Coefficient and gate are those from the end of the optimizer step before, as in TRL.

    Args:
        trainer: a `GRPOTrainer` with an entropy bonus.
        entropies: (B, T), in nats.
        mask: (B, T), 1 on the tokens that it acts on.
    """
    mean = (entropies * mask).sum() / mask.sum().clamp(min=1) / trainer._micro_batches()
    coef = trainer.entropy_coef
    if trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target:
        coef = 0.0
    if trainer.model.training:
        if trainer.use_adaptive_entropy:
            _follow_target(trainer, torch.stack([(entropies * mask).sum(), mask.sum()]).detach())
        if trainer.accelerator.sync_gradients:
            trainer._metrics["train"]["entropy_coef"].append(trainer.entropy_coef)
    return coef * mean


def _follow_target(trainer: Any, sums: Tensor) -> None:
    """Count a micro-batch's entropy and tokens, and move the coefficient when the optimizer steps."""
    before = trainer._entropy_window_stats
    trainer._entropy_window_stats = sums if before is None else before + sums
    if not trainer.accelerator.sync_gradients:
        return
    total, count = trainer.accelerator.reduce(trainer._entropy_window_stats, reduction="sum")
    entropy, args = (total / count.clamp(min=1)).item(), trainer.args
    step = args.entropy_coef_delta if entropy <= args.entropy_target else -args.entropy_coef_delta
    trainer.entropy_coef = min(max(trainer.entropy_coef + step, args.entropy_coef_min), args.entropy_coef_max)
    trainer._last_world_entropy = entropy
    trainer._entropy_window_stats = None
