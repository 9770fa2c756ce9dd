"""Filters of groups: DAPO, StarPO-S and RAGEN-2 train on the groups whose rewards differ, or differ most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sorl_trl.checks import SHARE, Checked
from sorl_trl.methods.data import ScoredRollout
from sorl_trl.methods.method import GRPO, PPO, Method
from sorl_trl.ops import group_spread, kept_groups

__all__ = ["DAPO", "RAGEN2", "STARPO_S", "TopK", "TopP", "ZeroVariance"]


@dataclass(frozen=True)
class ZeroVariance:
    """Keep the groups with differing rewards (DAPO, arXiv 2503.14476).

    If a reward is shaped, set `reward` to the name of the function that scores whether the answer is right.
    """

    reward: str | None = None

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N,) bool."""
        return _in_groups(rollout, self.reward, "zero_variance")


@dataclass(frozen=True)
class TopK(Checked):
    """Keep the `share` of the groups, rounded up, whose rewards differ most (StarPO-S, arXiv 2504.20073)."""

    share: Annotated[float, SHARE] = 0.25
    reward: str | None = None

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N,) bool."""
        return _in_groups(rollout, self.reward, "top_k", self.share)


@dataclass(frozen=True)
class TopP(Checked):
    """Keep the fewest groups that hold `share` of the sum of all reward variances (RAGEN-2, arXiv 2604.06268)."""

    share: Annotated[float, SHARE] = 0.9
    reward: str | None = None

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N,) bool."""
        return _in_groups(rollout, self.reward, "top_p", self.share)


def _in_groups(rollout: ScoredRollout, reward: str | None, group_filter: str, share: float = 1.0) -> Tensor:
    spread = group_spread(rollout.totals(reward), rollout.num_generations)
    return torch.repeat_interleave(kept_groups(spread, group_filter, share), rollout.num_generations)


DAPO = Method(
    keep=(ZeroVariance(),),
    name="dapo",
    settings=GRPO.settings | {"epsilon_high": 0.28, "loss_type": "dapo"},
    source="DAPO, arXiv 2503.14476, second-hand",
)
STARPO_S = Method(
    keep=(TopK(0.25),),
    name="starpo_s",
    settings=PPO.settings | {"epsilon_high": 0.28, "loss_type": "dapo"},
    source="StarPO-S, arXiv 2504.20073, from public code",
)
RAGEN2 = Method(
    keep=(TopP(0.9),),
    name="ragen2",
    settings=GRPO.settings,
    source="RAGEN-2, arXiv 2604.06268, second-hand",
)
