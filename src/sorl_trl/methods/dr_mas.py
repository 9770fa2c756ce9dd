"""Dr. MAS: several agents share a policy, and each is compared only with itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sorl_trl.methods.data import ScoredRollout
from sorl_trl.methods.method import GRPO, Method, over_batch
from sorl_trl.ops import matched_advantages

__all__ = ["DR_MAS", "AgentWise"]


@dataclass(frozen=True)
class AgentWise:
    """Dr. MAS's credit (arXiv 2602.08847, from the paper and public code): (R − μ_a) / (σ_a + 1e-4).

    A turn is compared with the turns of the same agent in the group. An agent that acts mostly where the team fails
    would otherwise get mostly negative advantages, and act less. `gamma` must be 1, because turns at any place in a
    trajectory are compared.

    The source differs: an agent's only turn in a group gets its reward instead of 0; each call is a row with a prompt
    of its own, where the agents of an environment read one growing context; and a turn gets the outcome less a penalty
    for that turn alone, where we take its return.
    """

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
        scale, group = rollout.scale == "group", rollout.num_generations
        return over_batch(matched_advantages(rollout.returns, agents, mask, group, scale), rollout)


DR_MAS = Method(
    credit=AgentWise(),
    name="dr_mas",
    settings=GRPO.settings | {"delta": 3.0, "loss_type": "dapo"},
    source="Dr. MAS, arXiv 2602.08847, from the paper and public code",
)
