"""MiniRL: a policy gradient weighted by the ratio to the policy that sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch

from sorl_trl.checks import Checked, Number
from sorl_trl.methods.credit import GroupMean
from sorl_trl.methods.data import Clip, MicroBatch, Objective
from sorl_trl.methods.losses import constant_mean
from sorl_trl.methods.method import GRPO, Method
from sorl_trl.ops import bounded_log_ratio, is_clipped, minirl_surrogate

__all__ = ["MINIRL", "MiniRL"]


@dataclass(frozen=True)
class MiniRL(Checked):
    """MiniRL's policy gradient (arXiv 2512.01374), weighted by π_θ/μ up to `cap` and 0 where PPO would clip.

    The weight is each token's ratio to the policy that sampled, so it contains the engine's mismatch.
    """

    cap: Annotated[float, Number(above=0)] = 5.0

    def check(self, method: Method, config: Any) -> None:
        """Raise ValueError if the method corrects the mismatch once more."""
        if method.weight is not None:
            raise ValueError(f"`weight` is {method.weight!r}, but must be None: {self!r} contains the correction.")

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token."""
        ratio, advantages = batch.ratio.detach(), batch.advantages
        stopped = is_clipped(ratio, advantages, batch.clip_range.low, batch.clip_range.high)
        mismatch = torch.where(batch.loss_mask, batch.old_logps - batch.sampling_logps, 0.0).nan_to_num()
        weights = ratio * bounded_log_ratio(mismatch).exp()
        return Objective(
            minirl_surrogate(batch.log_ratio, weights, advantages, stopped, self.cap), stopped, is_weighted=True
        )


MINIRL = replace(
    GRPO,
    clip=Clip(0.2, 0.27),
    surrogate=MiniRL(),
    mean=constant_mean,
    credit=GroupMean("none"),
    name="minirl",
    source="MiniRL, arXiv 2512.01374",
)
