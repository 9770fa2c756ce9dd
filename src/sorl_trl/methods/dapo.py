"""DAPO's filter: train on the groups whose rewards differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sorl_trl.methods.data import Clip, ScoredRollout
from sorl_trl.methods.losses import token_mean
from sorl_trl.methods.method import GRPO, Method
from sorl_trl.ops import differing_groups, group_spread

__all__ = ["DAPO", "ZeroVariance"]


@dataclass(frozen=True)
class ZeroVariance:
    """Keep the groups with differing rewards (DAPO, arXiv 2503.14476).

    If a reward is shaped, set `reward` to the name of the function that scores whether the answer is right.
    """

    reward: str | None = None

    def check(self, method: Method, config: Any) -> None:
        """Raise ValueError if groups have one trajectory, which never differs."""
        if config.num_generations == 1:
            raise ValueError(f"`num_generations` is 1, but must be at least 2: {self!r} compares trajectories.")

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N,) bool."""
        spread = group_spread(rollout.totals(self.reward), rollout.num_generations)
        return torch.repeat_interleave(differing_groups(spread), rollout.num_generations)


DAPO = replace(
    GRPO,
    clip=Clip(0.2, 0.28),
    mean=token_mean,
    keep=(ZeroVariance(),),
    name="dapo",
    source="DAPO, arXiv 2503.14476, second-hand",
)
