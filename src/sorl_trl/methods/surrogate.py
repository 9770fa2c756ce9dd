"""Surrogate: what is maximised for each token, and where its gradient is stopped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from sorl_trl.checks import NOT_NEGATIVE, Number, check_fields
from sorl_trl.methods.data import MicroBatch, Objective
from sorl_trl.ops import (
    bounded_log_ratio,
    clipped_surrogate,
    double_sided_surrogate,
    is_clipped,
    is_outside,
    minirl_surrogate,
)


@dataclass(frozen=True)
class PPOMin:
    """PPO's min(w Â, clip(w, 1 − ε_low, 1 + ε_high) Â) (arXiv 1707.06347), with TRL's `delta` if that is set."""

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token with the ratio of its unit."""
        ratio = batch.ratio
        value = clipped_surrogate(ratio, batch.advantages, *batch.clip_range)
        return Objective(value, is_clipped(ratio.detach(), batch.advantages, *batch.clip_range))


@dataclass(frozen=True)
class DoubleSided:
    """SAO's clip (arXiv 2607.07508, from its abstract): no gradient outside the range, whatever the sign of Â."""

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token with the ratio of its unit."""
        low, high, _ = batch.clip_range
        ratio = batch.ratio
        stopped = is_outside(ratio.detach(), low, high) & (batch.advantages != 0)
        return Objective(double_sided_surrogate(ratio, batch.advantages, low, high), stopped)


@dataclass(frozen=True)
class MiniRL:
    """MiniRL's policy gradient (arXiv 2512.01374), weighted by π_θ/μ up to `cap` and 0 where PPO would clip.

    The weight is each token's ratio to the policy that sampled. Use it with `Unweighted`, or the engine's mismatch
    would be corrected twice.
    """

    cap: Annotated[float, Number(above=0)] = 5.0

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token."""
        ratio, advantages = batch.ratio.detach(), batch.advantages
        stopped = is_clipped(ratio, advantages, batch.clip_range.low, batch.clip_range.high)
        mismatch = torch.where(batch.loss_mask, batch.old_logps - batch.sampling_logps, 0.0).nan_to_num()
        weights = ratio * bounded_log_ratio(mismatch).exp()
        return Objective(minirl_surrogate(batch.log_ratio, weights, advantages, stopped, self.cap), stopped)


@dataclass(frozen=True)
class DPPO:
    """Maximise w_t Â_t − `kl_coef` ℓ_t², without w_t Â_t if the token's probability has moved too far along Â.

    This is prime-rl's default policy loss, whose trust region is in probabilities instead of ratios. w = π_θ/μ and
    ℓ = log w compare with the policy that sampled, so use it with `Unweighted`. A token loses w Â where Â > 0 and
    π_θ − μ > `mask_high`, or Â <= 0 and π_θ − μ < −`mask_low`; the KL stays. Source: DPPO's binary total variation
    (arXiv 2602.04879) and Kimi K2.5's KL (arXiv 2602.02276), as read in prime-rl's default loss.
    """

    mask_low: Annotated[float, NOT_NEGATIVE] = 0.2
    mask_high: Annotated[float, NOT_NEGATIVE] = 0.2
    kl_coef: Annotated[float, NOT_NEGATIVE] = 1e-3

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token."""
        sampling = torch.where(batch.sampling_logps.isfinite(), batch.sampling_logps, batch.old_logps)
        log_ratio = bounded_log_ratio(batch.logps - sampling)
        moved = (batch.logps.exp() - sampling.exp()).detach()
        stopped = torch.where(batch.advantages > 0, moved > self.mask_high, moved < -self.mask_low)
        gain = torch.where(stopped, 0.0, log_ratio.exp() * batch.advantages)
        return Objective(gain - self.kl_coef * log_ratio.square(), stopped)
