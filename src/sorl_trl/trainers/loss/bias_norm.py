"""Normalization of the gradient by the clipping bias (S-PPO, ST-PPO; docs/paper_to_code.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from sorl_trl.ops import clipping_bias, is_clipped
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.loss.micro_batch import MicroBatch
from sorl_trl.trainers.loss.so_loss import log_ratio_of_units


class ClippingBiasNormalizer:
    """Accumulates C(θ), the gradient that clipping removed, and divides the step's gradient by max(1, ‖C(θ)‖₂).

    C(θ) averages the tokens of each trajectory, as `loss_type="grpo"` does, whatever the loss type (`clipping_bias`).

    C(θ) is taken over the whole optimizer step: the mean over its micro-batches and over all ranks. The floor of 1
    is ours: with nothing clipped C is 0 and the division is off.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._gradients: list[Tensor] | None = None

    def add(self, clipping_bias: Tensor, any_clipped: bool) -> None:
        """Add the gradient of one micro-batch's share of the clipping bias: a second backward, only when needed.

        Args:
            clipping_bias: scalar with gradient, already divided by the number of micro-batches in the step.
            any_clipped: whether anything was clipped in this micro-batch (its gradient is 0 otherwise).
        """
        if not any_clipped:
            return
        # autograd.grad, unlike backward, neither touches .grad nor fires DDP's reduction hooks.
        bias_gradients = torch.autograd.grad(clipping_bias, self._parameters, retain_graph=True, allow_unused=True)
        gradients = [
            torch.zeros_like(p, dtype=torch.float32) if g is None else g.float()
            for p, g in zip(self._parameters, bias_gradients, strict=True)
        ]
        if self._gradients is None:
            self._gradients = gradients
        else:
            torch._foreach_add_(self._gradients, gradients)

    def normalize(self, accelerator: Accelerator) -> float:
        """Divide every `.grad` by max(1, ‖C(θ)‖₂), forget C(θ), and return the norm. All ranks call it together."""
        clipped_anywhere = accelerator.reduce(
            torch.tensor(float(self._gradients is not None), device=accelerator.device), reduction="sum"
        )
        if clipped_anywhere == 0:
            return 0.0
        gradients = self._gradients or [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters]
        flat = accelerator.reduce(torch.cat([g.reshape(-1) for g in gradients]), reduction="mean")
        norm = float(torch.linalg.vector_norm(flat))
        self._gradients = None
        if norm > 1.0:
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], 1.0 / norm)
        return norm


def clipping_bias_of(batch: MicroBatch, weights: Tensor | None, args: TurnLevelConfig) -> tuple[Tensor, bool]:
    """The clipping bias of a micro-batch, with gradient, and whether anything is clipped in it.

    Args:
        batch: whose log-ratio has a gradient.
        weights: (B, T) or (B, 1) by which the surrogate of each token is multiplied, if by anything.
        args: `importance_sampling_level` and `turn_ratio` are read.
    """
    kept = batch.turns.loss_mask
    ratio = log_ratio_of_units(batch.log_ratio, batch.turns, batch.advantages, args).exp()
    advantages = batch.advantages if weights is None else batch.advantages * weights
    clip_range = batch.clip_ranges.units
    stopped = is_clipped(ratio.detach(), advantages, *clip_range)
    return clipping_bias(ratio, advantages, stopped, kept), bool((stopped & kept).any())


def build_bias_normalizer(trainer: Any) -> ClippingBiasNormalizer | None:
    """The normalizer that the configuration of a `GRPOTrainer` asks for, or None.

    Raises ValueError under DeepSpeed and FSDP.
    """
    if trainer.args.clip_normalization != "bias_norm":
        return None
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError(
            "`clip_normalization='bias_norm'` rescales the gradient between backward and optimizer step, where "
            "DeepSpeed and FSDP keep it in shards of their own. Set `clip_normalization='none'`, or use DDP."
        )
    return ClippingBiasNormalizer(trainer.model.parameters())
