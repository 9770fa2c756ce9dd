"""DAPO's filter: train on the groups whose rewards differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sorl_trl.methods.data import ScoredRollout
from sorl_trl.methods.method import GRPO, Method
from sorl_trl.ops import differing_groups, group_spread

__all__ = ["DAPO", "ZeroVariance"]


@dataclass(frozen=True)
class ZeroVariance:
    """Keep the groups with differing rewards (DAPO, arXiv 2503.14476).

    If a reward is shaped, set `reward` to the name of the function that scores whether the answer is right.
    """

    reward: str | None = None

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N,) bool."""
        spread = group_spread(rollout.totals(self.reward), rollout.num_generations)
        return torch.repeat_interleave(differing_groups(spread), rollout.num_generations)


DAPO = Method(
    keep=(ZeroVariance(),),
    name="dapo",
    settings=GRPO.settings | {"epsilon_high": 0.28, "loss_type": "dapo"},
    source="DAPO, arXiv 2503.14476, second-hand",
)
