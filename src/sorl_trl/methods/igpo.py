"""IGPO: turns earn the information that they gain, and trajectories their outcome, each on its own scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from sorl_trl.checks import Checked
from sorl_trl.methods.credit import SCALES
from sorl_trl.methods.data import ScoredRollout
from sorl_trl.methods.method import GRPO
from sorl_trl.ops import separate_turn_advantages

__all__ = ["IGPO", "Separate"]


@dataclass(frozen=True)
class Separate(Checked):
    """IGPO's credit (arXiv 2510.14967): turn rewards and outcomes are normalized separately, discounted and added.

    In IGPO, a turn earns how much it raises the policy's mean log-probability of the golden answer, and the last turn
    earns the outcome, F1. Copy that reward from examples/information_gain.py: `rewards: [f1,
    examples.information_gain.InformationGain]` in a recipe. Each rollout costs a pass over every state.
    """

    scale: Annotated[str, SCALES] = "group"

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N, K) advantages."""
        outcomes = rollout.outcome_on_last_turn
        kinds = [
            (rollout.turn_rewards, rollout.has_turn_reward),
            (outcomes, rollout.is_last_turn & rollout.has_outcome.unsqueeze(1)),
        ]
        mask = rollout.turn_mask.float()
        return separate_turn_advantages(kinds, mask, rollout.num_generations, rollout.gamma, self.scale)


IGPO = replace(GRPO, credit=Separate(), name="igpo", source="IGPO, arXiv 2510.14967, from the paper and public code")
