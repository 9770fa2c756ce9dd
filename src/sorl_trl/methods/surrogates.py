"""Surrogates of no single method here: PPO's, and three of TRL's losses that never stop a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from sorl_trl.checks import NOT_NEGATIVE, Checked, Number
from sorl_trl.methods.data import MicroBatch, Objective
from sorl_trl.ops import (
    cispo_surrogate,
    clipped_surrogate,
    is_clipped,
    sapo_surrogate,
    vespo_surrogate,
    vespo_weights,
)

__all__ = ["CISPO", "SAPO", "VESPO", "PPOMin"]


@dataclass(frozen=True)
class PPOMin:
    """PPO's min(w Â, clip(w, 1 − ε_low, 1 + ε_high) Â) (arXiv 1707.06347), with TRL's `delta` if that is set."""

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token with the ratio of its unit."""
        ratio = batch.ratio
        value = clipped_surrogate(ratio, batch.advantages, *batch.clip_range)
        return Objective(value, is_clipped(ratio.detach(), batch.advantages, *batch.clip_range))


class _Soft(Checked):
    def check(self, method: Any, config: Any) -> None:
        """Raise ValueError if the method divides by what clipping removes."""
        if method.bias_norm:
            raise ValueError(
                f"`bias_norm` is True, which divides by what clipping removes, but the surrogate {self!r} never "
                "zeroes a gradient: set `bias_norm` to False."
            )


@dataclass(frozen=True)
class CISPO(_Soft):
    """CISPO's sg[min(w, cap)] Â log π_θ (arXiv 2506.13585). In TRL, `epsilon_high` is the cap."""

    cap: Annotated[float, Number(above=0, finite=False)] = 5.0

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token, and the share of ratios above the cap."""
        ratio = batch.ratio.detach()
        is_capped = ((ratio > self.cap) & (batch.advantages > 0)).float()
        value = cispo_surrogate(ratio, batch.advantages, batch.logps, self.cap)
        return Objective(value, None, {"cispo_clip_ratio": batch.per_unit(is_capped)})


@dataclass(frozen=True)
class SAPO(_Soft):
    """SAPO's (4/τ) σ(τ (w − 1)) Â (arXiv 2511.20347), with τ by the sign of the advantage."""

    temperature_pos: Annotated[float, Number(above=0)] = 1.0
    temperature_neg: Annotated[float, Number(above=0)] = 1.05

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token."""
        return Objective(
            sapo_surrogate(batch.ratio, batch.advantages, self.temperature_pos, self.temperature_neg), None
        )


@dataclass(frozen=True)
class VESPO(_Soft):
    """VESPO's sg[φ(w)] Â log π_θ, where φ(w) = e^λ w^k e^{−λ w} weighs a sequence by its ratio, as in TRL.

    The ratio contains the engine's mismatch, so that no further weights multiply it.
    """

    k_pos: Annotated[float, NOT_NEGATIVE] = 2.0
    lambda_pos: Annotated[float, NOT_NEGATIVE] = 3.0
    k_neg: Annotated[float, NOT_NEGATIVE] = 3.0
    lambda_neg: Annotated[float, NOT_NEGATIVE] = 2.0

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token, and the mean of φ."""
        powers, decays = (self.k_pos, self.k_neg), (self.lambda_pos, self.lambda_neg)
        engine = batch.inputs.get("importance_sampling_ratio")
        weight = vespo_weights(batch.log_ratio, batch.loss_mask, batch.advantages, powers, decays, engine)
        shown = (weight, torch.ones_like(weight)) if weight.size(1) == 1 else (weight, batch.loss_mask)
        value = vespo_surrogate(weight, batch.advantages, batch.logps)
        return Objective(value, None, {"vespo/phi_seq_mean": shown}, is_weighted=True)
