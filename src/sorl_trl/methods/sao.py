"""SAO's clip, which stops the gradient on both sides of the range."""

from __future__ import annotations

from dataclasses import dataclass

from sorl_trl.methods.data import MicroBatch, Objective
from sorl_trl.methods.method import GRPO, Method
from sorl_trl.ops import double_sided_surrogate, is_outside

__all__ = ["SAO", "DoubleSided"]


@dataclass(frozen=True)
class DoubleSided:
    """SAO's clip (arXiv 2607.07508, from its abstract): no gradient outside the range, for either sign of Â."""

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token with the ratio of its unit."""
        low, high, _ = batch.clip_range
        ratio = batch.ratio
        stopped = is_outside(ratio.detach(), low, high) & (batch.advantages != 0)
        return Objective(double_sided_surrogate(ratio, batch.advantages, low, high), stopped)


SAO = Method(
    surrogate=DoubleSided(),
    name="double_sided",
    settings=GRPO.settings,
    source="SAO, arXiv 2607.07508, from its abstract and second-hand",
)
