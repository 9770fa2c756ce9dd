"""Normalization of the gradient by the clipping bias (S-PPO, ST-PPO; docs/paper_to_code.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from sorl_trl.methods import MicroBatch, Objective
from sorl_trl.ops import clipping_bias
from sorl_trl.trainers.critic.model import is_critic_name
from sorl_trl.trainers.rollout import corrects_sampling


class ClippingBiasNormalizer:
    """Accumulates C(θ), the gradient that clipping removed, and divides the step's gradient by max(1, ‖C(θ)‖₂).

    C(θ) averages the tokens of each trajectory, as `loss_type="grpo"` does, whatever the loss type. It is the mean
    over all micro-batches of the optimizer step and over all processes. The floor of 1 is our choice: if nothing is
    clipped, C is 0 and nothing is divided.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._gradients: list[Tensor] | None = None

    def observe(self, trainer: Any, batch: MicroBatch, objective: Objective) -> None:
        """Add one micro-batch's share of C(θ), by a second backward pass if something is clipped."""
        if not (batch.is_training and batch.log_ratio.requires_grad):
            return
        stopped = objective.stopped & batch.loss_mask
        if stopped.any():
            weights = batch.inputs["importance_sampling_ratio"] if corrects_sampling(trainer) else 1.0
            bias = clipping_bias(batch.ratio, batch.advantages * weights, stopped, batch.loss_mask)
            self.add(bias * batch.row_scale / trainer._micro_batches())

    def add(self, bias: Tensor) -> None:
        """Add the gradient of a scalar, already divided by the number of micro-batches in the step."""
        # autograd.grad, unlike backward, neither touches .grad nor fires DDP's reduction hooks.
        found = torch.autograd.grad(
            bias, self._parameters, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        gradients = [gradient.float() for gradient in found]
        if self._gradients is None:
            self._gradients = gradients
        else:
            torch._foreach_add_(self._gradients, gradients)

    def normalize(self, accelerator: Accelerator) -> float:
        """Divide every `.grad` by max(1, ‖C(θ)‖₂), reset C(θ) and return the norm. All processes call it together."""
        is_clipped = torch.tensor(float(self._gradients is not None), device=accelerator.device)
        if accelerator.reduce(is_clipped, reduction="sum") == 0:
            return 0.0
        gradients = self._gradients or [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters]
        flat = accelerator.reduce(torch.cat([g.reshape(-1) for g in gradients]), reduction="mean")
        norm = float(torch.linalg.vector_norm(flat))
        self._gradients = None
        if norm > 1.0:
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], 1.0 / norm)
        return norm


def bias_normalizer(trainer: Any) -> ClippingBiasNormalizer | None:
    """The normalizer of a trainer with `bias_norm`, or None.

    Raises:
        ValueError: DeepSpeed or FSDP is used, gradient checkpointing is reentrant, or TRL's options mask tokens out
            of the loss.
    """
    args, reason = trainer.args, None
    if not args.bias_norm:
        return None
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        reason = "DeepSpeed and FSDP shard the gradient that it divides: set `bias_norm` to False, or use DDP"
    elif (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        reason = (
            "reentrant gradient checkpointing cannot give the second gradient that it computes: set "
            "`gradient_checkpointing_kwargs={'use_reentrant': False}`"
        )
    elif args.top_entropy_quantile != 1.0 or args.off_policy_mask_threshold is not None:
        reason = "it would count what `top_entropy_quantile` or `off_policy_mask_threshold` masks: use one of them"
    if reason:
        raise ValueError(f"`bias_norm` is True, but {reason}.")
    named = trainer.model.named_parameters()
    return ClippingBiasNormalizer(parameter for name, parameter in named if not is_critic_name(name))
