"""What the loss reads of TRL's trainer, in one place: another version of TRL changes this file.

args, epsilon_low, epsilon_high, max_completion_length               the loss of TRL's options,
top_entropy_quantile, get_high_entropy_mask, get_gamma_weights,      its masks and weights
off_policy_mask_threshold, get_off_policy_mask
aux_loss_enabled, router_aux_loss_coef                               the router loss of a mixture
_entropy_bonus_enabled, entropy_coef, use_adaptive_entropy,          the entropy bonus, whose coefficient
_last_world_entropy, _entropy_window_stats                           may follow a target
current_gradient_accumulation_steps, state.global_step, accelerator  how an update is split
_metrics                                                             what is logged
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sorl_trl.methods import ClipRange
from sorl_trl.methods.method import Surrogate
from sorl_trl.trainers.config import TurnLevelConfig


@dataclass(frozen=True)
class LossSettings:
    """All that decides the loss of a micro-batch besides the batch and the model's pass over it."""

    args: TurnLevelConfig
    surrogate: Surrogate
    """The method's."""
    token_range: ClipRange
    max_completion_length: int
    is_training: bool
    step: int
    """The number of optimizer steps made."""
    ends_step: bool
    """Whether the optimizer steps after the micro-batch."""
    micro_batches: float
    """What the loss of a micro-batch is divided by."""
    share: float
    """The micro-batch's share of the generation batch, over all processes."""
    reference_beta: float
    """The coefficient of the reference KL."""
    weighs_engine: bool
    """Whether the batch's `importance_sampling_ratio` multiplies the loss."""
    gamma_weights: Callable[..., Tensor]
    """VESPO's, of TRL."""
    off_policy_mask: Callable[..., Tensor] | None
    """TRL's, if `off_policy_mask_threshold` is set."""
    entropy_mask: Callable[[Tensor, Tensor], Tensor] | None
    """TRL's mask of (B, T) entropies and a mask, if `top_entropy_quantile` is below 1."""
    entropy_bonus: Callable[[Tensor, Tensor], Tensor] | None
    """The bonus of (B, T) entropies on a mask, if there is one."""
    router_coef: float | None
    """The coefficient of a mixture's router loss, if it has one."""


class Host:
    """A trainer of TRL, as the loss sees it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def is_training(self) -> bool:
        return bool(self._trainer.model.training)

    @property
    def metrics(self) -> dict[str, list[float]]:
        """TRL's lists of values to log, by name."""
        logged: dict[str, list[float]] = self._trainer._metrics["train" if self.is_training else "eval"]
        return logged

    def loss_settings(self, surrogate: Surrogate, weighs_engine: bool) -> LossSettings:
        """The settings of the next micro-batch."""
        trainer, args, is_training = self._trainer, self._trainer.args, self.is_training
        quantile, threshold = trainer.top_entropy_quantile, trainer.off_policy_mask_threshold

        def off_policy_mask(**given: Any) -> Tensor:
            masked: Tensor = trainer.get_off_policy_mask(**given, off_policy_threshold=threshold)
            return masked

        def entropy_mask(entropies: Tensor, mask: Tensor) -> Tensor:
            masked: Tensor = trainer.get_high_entropy_mask(entropies, mask, 1 - quantile)
            return masked

        micro_batches = int(args.steps_per_generation or 1) if is_training else 1
        return LossSettings(
            args=args,
            surrogate=surrogate,
            token_range=ClipRange(trainer.epsilon_low, trainer.epsilon_high, args.delta),
            max_completion_length=trainer.max_completion_length,
            is_training=is_training,
            step=trainer.state.global_step,
            ends_step=trainer.accelerator.sync_gradients or not is_training,
            micro_batches=float(trainer.current_gradient_accumulation_steps) if is_training else 1.0,
            share=1.0 / (trainer.accelerator.num_processes * micro_batches),
            reference_beta=float(trainer.beta),
            weighs_engine=weighs_engine,
            gamma_weights=trainer.get_gamma_weights,
            off_policy_mask=None if threshold is None else off_policy_mask,
            entropy_mask=entropy_mask if quantile < 1.0 else None,
            entropy_bonus=self._entropy_bonus if trainer._entropy_bonus_enabled else None,
            router_coef=trainer.router_aux_loss_coef if trainer.aux_loss_enabled else None,
        )

    def _entropy_bonus(self, entropies: Tensor, mask: Tensor) -> Tensor:
        """The entropy bonus of a micro-batch: the coefficient times the mean of (B, T) entropies, in nats, on `mask`.

        As in TRL, the coefficient is fixed or follows a target, based on values from the end of the previous step.
        """
        trainer = self._trainer
        sums = torch.stack([(entropies * mask).sum(), mask.sum()])
        coef = trainer.entropy_coef
        if trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target:
            coef = 0.0
        if self.is_training:
            if trainer.use_adaptive_entropy:
                self._follow_entropy(sums.detach())
            if trainer.accelerator.sync_gradients:
                self.metrics["entropy_coef"].append(trainer.entropy_coef)
        return coef * sums[0] / sums[1].clamp(min=1)

    def _follow_entropy(self, sums: Tensor) -> None:
        """Add a micro-batch's entropy and tokens, and adjust the coefficient when the optimizer steps."""
        trainer, args = self._trainer, self._trainer.args
        before = trainer._entropy_window_stats
        trainer._entropy_window_stats = sums if before is None else before + sums
        if not trainer.accelerator.sync_gradients:
            return
        total, count = trainer.accelerator.reduce(trainer._entropy_window_stats, reduction="sum")
        entropy = (total / count.clamp(min=1)).item()
        step = args.entropy_coef_delta if entropy <= args.entropy_target else -args.entropy_coef_delta
        trainer.entropy_coef = min(max(trainer.entropy_coef + step, args.entropy_coef_min), args.entropy_coef_max)
        trainer._last_world_entropy = entropy
        trainer._entropy_window_stats = None
