"""LOOP: a group's trajectories are each other's baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from sorl_trl.methods.data import Clip, ScoredRollout
from sorl_trl.methods.method import GRPO
from sorl_trl.ops import leave_one_out_advantages

__all__ = ["LOOP", "LeaveOneOut"]


@dataclass(frozen=True)
class LeaveOneOut:
    """LOOP's credit: the return of each turn, compared with the group's other trajectories.

    It does not divide by a standard deviation, which would blow up small differences in groups that nearly agree.
    Source: the public code of arXiv 2502.01600, which samples six trajectories per group. The comparison of turns is
    our addition.
    """

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N, K) advantages."""
        return leave_one_out_advantages(rollout.returns, rollout.turn_mask, rollout.num_generations)


LOOP = replace(
    GRPO,
    clip=Clip(1 - 1 / 1.1, 0.1),
    credit=LeaveOneOut(),
    name="loop",
    source="LOOP, arXiv 2502.01600, from public code",
)
