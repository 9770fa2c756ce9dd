"""Dr. MAS: several agents share a policy, and each is compared with itself alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sorl_trl.checks import OneOf, check_fields
from sorl_trl.methods.data import ScoredRollout
from sorl_trl.methods.method import GRPO, Method, over_batch
from sorl_trl.ops import agent_advantages

__all__ = ["DR_MAS", "AgentWise"]

_COMPARED = OneOf(("agent", "group"))


@dataclass(frozen=True)
class AgentWise:
    """Dr. MAS's credit (arXiv 2602.08847, from the paper and public code): (R − μ_a) / (σ_a + 1e-4).

    μ_a and σ_a are those of the returns of all turns of the group in which agent a acts. Either may be that of the
    whole group instead. In the public code, GRPO, with both of the group, gives each trajectory one vote.

    Args:
        mean: Whose mean to subtract: that of the "agent" or of the "group".
        spread: Whose σ to divide by.
        votes: What counts once in both: a "turn", or a "trajectory", whatever its number of turns.
    """

    mean: Annotated[str, _COMPARED] = "agent"
    spread: Annotated[str, _COMPARED] = "agent"
    votes: Annotated[str, OneOf(("turn", "trajectory"))] = "turn"

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N, K) advantages. Raises ValueError if no turn has an agent."""
        mask, agents = rollout.turn_mask, rollout.agents
        everybody = torch.zeros_like(mask, dtype=torch.long)
        if agents is None and mask.any():
            raise ValueError(
                f"The rollout names no agents, but {self!r} compares them: let the environment set `agent`, or the "
                "rollout return `agents`."
            )
        compared = {"agent": everybody if agents is None else agents, "group": everybody}
        spread = compared[self.spread] if rollout.scale == "group" else None
        group = rollout.num_generations
        advantages = agent_advantages(rollout.returns, compared[self.mean], spread, mask, group, self.votes)
        return over_batch(advantages, rollout)


DR_MAS = Method(
    credit=AgentWise(),
    name="dr_mas",
    settings=GRPO.settings | {"delta": 3.0, "loss_type": "dapo"},
    source="Dr. MAS, arXiv 2602.08847, from the paper and public code",
)
