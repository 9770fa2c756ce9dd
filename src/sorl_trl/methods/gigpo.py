"""GiGPO: each turn is also compared with the turns of its group that start in the same state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from sorl_trl.checks import NOT_NEGATIVE, Checked
from sorl_trl.methods.credit import SCALES, group_mean_advantages, over_batch
from sorl_trl.methods.data import ScoredRollout
from sorl_trl.methods.method import GRPO
from sorl_trl.ops import matched_advantages

__all__ = ["GIGPO", "GiGPO"]


@dataclass(frozen=True)
class GiGPO(Checked):
    """GiGPO's credit (arXiv 2505.10978, from public code): the group's advantage plus `coef` times the step's.

    The step's advantage compares a turn with the turns of its group that start in the same state: after the same
    observation, or at the prompt. A state that occurs once adds nothing. `gamma` discounts both advantages; the source
    discounts only the step's.
    """

    coef: Annotated[float, NOT_NEGATIVE] = 1.0
    scale: Annotated[str, SCALES] = "group"

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N, K) advantages."""
        by_group, group = self.scale == "group", rollout.num_generations
        state_credit = matched_advantages(rollout.returns, rollout.states, rollout.turn_mask, group, by_group)
        of_group = group_mean_advantages(rollout, self.scale)
        return of_group + self.coef * over_batch(state_credit, rollout, self.scale)


GIGPO = replace(GRPO, credit=GiGPO(), gamma=0.95, name="gigpo", source="GiGPO, arXiv 2505.10978, from public code")
