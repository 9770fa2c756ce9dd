"""Dr. MAS: several agents share a policy, and each is compared only with itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from sorl_trl.checks import Checked
from sorl_trl.methods.credit import SCALES, over_batch
from sorl_trl.methods.data import Clip, ScoredRollout
from sorl_trl.methods.losses import token_mean
from sorl_trl.methods.method import GRPO, Method
from sorl_trl.ops import matched_advantages

__all__ = ["DR_MAS", "AgentWise"]


@dataclass(frozen=True)
class AgentWise(Checked):
    """Dr. MAS's credit (arXiv 2602.08847, from the paper and public code): (R − μ_a) / (σ_a + 1e-4).

    A turn is compared with the turns of the same agent in the group. An agent that acts mostly where the team fails
    would otherwise get mostly negative advantages, and act less. `gamma` must be 1, because turns at any place in a
    trajectory are compared.

    The source differs: an agent's only turn in a group gets its reward instead of 0; each call is a row with a prompt
    of its own, where the agents of an environment read one growing context; and a turn gets the outcome less a penalty
    for that turn alone, where we take its return.
    """

    scale: Annotated[str, SCALES] = "group"

    def check(self, method: Method, config: Any) -> None:
        """Raise ValueError for a discount."""
        if method.gamma != 1:
            raise ValueError(
                f"`gamma` is {method.gamma!r}, but must be 1: {self!r} compares turns at different positions."
            )

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N, K) advantages. Raises ValueError if no turn has an agent."""
        mask, agents = rollout.turn_mask, rollout.agents
        if agents is None:
            if mask.any():
                raise ValueError(
                    f"The rollout names no agents, but {self!r} compares them: let the environment set `agent`, or "
                    "the rollout return `agents`."
                )
            agents = torch.zeros_like(mask, dtype=torch.long)
        by_group, group = self.scale == "group", rollout.num_generations
        advantages = matched_advantages(rollout.returns, agents, mask, group, by_group)
        return over_batch(advantages, rollout, self.scale)


DR_MAS = replace(
    GRPO,
    clip=Clip(0.2, delta=3.0),
    mean=token_mean,
    credit=AgentWise(),
    name="dr_mas",
    source="Dr. MAS, arXiv 2602.08847, from the paper and public code",
)
