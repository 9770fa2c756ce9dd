"""Dr. MAS: several agents share a policy, and each is compared with itself alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sorl_trl.checks import POSITIVE_COUNT, check_fields
from sorl_trl.methods.data import ScoredRollout
from sorl_trl.methods.method import GRPO, Method, over_batch
from sorl_trl.ops import state_advantages

__all__ = ["DR_MAS", "AgentWise"]


@dataclass(frozen=True)
class AgentWise:
    """Dr. MAS's credit (arXiv 2602.08847, from the paper and public code): (R − μ_a) / (σ_a + 1e-4).

    μ_a and the unbiased σ_a are those of the returns of all turns of the group in which agent a acts, one vote per
    turn. The agents act in a fixed order, again and again: turn k is that of agent k mod `agents`. An agent's only
    turn in a group gets 0, whereas the public code gives it its reward. 1e-4, which is TRL's, is 1e-6 there.
    """

    agents: Annotated[int, POSITIVE_COUNT] = 2

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N, K) advantages."""
        returns, mask = rollout.returns, rollout.turn_mask
        agents = (torch.arange(mask.size(1), device=mask.device) % self.agents).long().expand(mask.shape)
        agent_credit = state_advantages(returns, agents, mask, rollout.num_generations, rollout.scale == "group")
        return over_batch(agent_credit, rollout)


DR_MAS = Method(
    credit=AgentWise(),
    name="dr_mas",
    settings=GRPO.settings | {"delta": 3.0, "loss_type": "dapo"},
    source="Dr. MAS, arXiv 2602.08847, from the paper and public code",
)
