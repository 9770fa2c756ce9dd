"""DPPO: a trust region in probabilities instead of ratios."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from sorl_trl.checks import NOT_NEGATIVE, Checked
from sorl_trl.methods.data import MicroBatch, Objective
from sorl_trl.methods.engine import Unweighted
from sorl_trl.methods.method import GRPO, Method
from sorl_trl.ops import bounded_log_ratio

__all__ = ["DPPO", "PRIME_RL"]


@dataclass(frozen=True)
class DPPO(Checked):
    """Maximise w_t Â_t − `kl_coef` ℓ_t², without w_t Â_t if the token's probability has moved too far along Â.

    This is prime-rl's default policy loss, whose trust region is in probabilities instead of ratios. w = π_θ/μ and
    ℓ = log w compare with the policy that sampled, so use it with `Unweighted`. A token loses w Â where Â > 0 and
    π_θ − μ > `mask_high`, or Â <= 0 and π_θ − μ < −`mask_low`; the KL stays. Source: DPPO's binary total variation
    (arXiv 2602.04879) and Kimi K2.5's KL (arXiv 2602.02276), as read in prime-rl's default loss.
    """

    mask_low: Annotated[float, NOT_NEGATIVE] = 0.2
    mask_high: Annotated[float, NOT_NEGATIVE] = 0.2
    kl_coef: Annotated[float, NOT_NEGATIVE] = 1e-3

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token."""
        sampling = torch.where(batch.sampling_logps.isfinite(), batch.sampling_logps, batch.old_logps)
        log_ratio = bounded_log_ratio(batch.logps - sampling)
        moved = (batch.logps.exp() - sampling.exp()).detach()
        stopped = torch.where(batch.advantages > 0, moved > self.mask_high, moved < -self.mask_low)
        gain = torch.where(stopped, 0.0, log_ratio.exp() * batch.advantages)
        return Objective(gain - self.kl_coef * log_ratio.square(), stopped)


PRIME_RL = Method(
    surrogate=DPPO(),
    weight=Unweighted(),
    name="dppo",
    settings=GRPO.settings | {"loss_type": "dapo"},
    source="DPPO, arXiv 2602.04879, with the KL of Kimi K2.5, arXiv 2602.02276, as read in prime-rl",
)
