"""MiniRL: a policy gradient weighted by the ratio to the policy that sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch

from sorl_trl.checks import Checked, Number
from sorl_trl.methods.credit import GroupMean
from sorl_trl.methods.data import Clip, MicroBatch, Objective
from sorl_trl.methods.engine import Unweighted
from sorl_trl.methods.means import ConstantMean
from sorl_trl.methods.method import GRPO
from sorl_trl.ops import bounded_log_ratio, is_clipped, minirl_surrogate

__all__ = ["MINIRL", "MiniRL"]


@dataclass(frozen=True)
class MiniRL(Checked):
    """MiniRL's policy gradient (arXiv 2512.01374), weighted by π_θ/μ up to `cap` and 0 where PPO would clip.

    The weight is each token's ratio to the policy that sampled. Use it with `Unweighted`, or the engine's mismatch
    would be corrected twice.
    """

    cap: Annotated[float, Number(above=0)] = 5.0

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token."""
        ratio, advantages = batch.ratio.detach(), batch.advantages
        stopped = is_clipped(ratio, advantages, batch.clip_range.low, batch.clip_range.high)
        mismatch = torch.where(batch.loss_mask, batch.old_logps - batch.sampling_logps, 0.0).nan_to_num()
        weights = ratio * bounded_log_ratio(mismatch).exp()
        return Objective(minirl_surrogate(batch.log_ratio, weights, advantages, stopped, self.cap), stopped)


MINIRL = replace(
    GRPO,
    clip=Clip(0.2, 0.27),
    surrogate=MiniRL(),
    mean=ConstantMean(),
    credit=GroupMean("none"),
    weight=Unweighted(),
    name="minirl",
    source="MiniRL, arXiv 2512.01374",
)
