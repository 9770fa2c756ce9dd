"""Keep: which trajectories, turns or tokens of a rollout are trained on.

Those that are not kept leave the loss and its denominator. Their rewards stay in the group's baseline, in the reward
metrics and in evaluations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sorl_trl.checks import NOT_NEGATIVE, SHARE, Number, check_fields
from sorl_trl.methods.data import ScoredRollout
from sorl_trl.ops import group_spread, is_vetoed, kept_groups, turn_broadcast, turn_mismatch, within


@dataclass(frozen=True)
class ZeroVariance:
    """Keep the groups whose rewards differ (DAPO, arXiv 2503.14476).

    If a reward is shaped, set `reward` to the name of the function that says whether the answer is right.
    """

    reward: str | None = None

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N,) bool."""
        return _in_groups(rollout, self.reward, "zero_variance")


@dataclass(frozen=True)
class TopK:
    """Keep the `share` of the groups, rounded up, whose rewards differ most (StarPO-S, arXiv 2504.20073)."""

    share: Annotated[float, SHARE] = 0.25
    reward: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N,) bool."""
        return _in_groups(rollout, self.reward, "top_k", self.share)


@dataclass(frozen=True)
class TopP:
    """Keep the fewest groups that hold `share` of the sum of all reward variances (RAGEN-2, arXiv 2604.06268)."""

    share: Annotated[float, SHARE] = 0.9
    reward: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N,) bool."""
        return _in_groups(rollout, self.reward, "top_p", self.share)


@dataclass(frozen=True)
class NotVoid:
    """Leave out trajectories with a turn that neither acts nor answers (SimpleTIR, arXiv 2509.02479).

    A penalty for invalid actions then has no effect, because the penalized trajectories are not trained on.
    """

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N,) bool.

        Raises:
            ValueError: The rollout does not say what its turns did.
        """
        if rollout.void is None:
            raise ValueError(
                "`keep` has NotVoid, but the rollout does not say what its turns did: use `SearchRollout`, "
                "`AgentRollout` or one that returns a `sorl_trl.types.Trajectory` per row, as `trajectory`."
            )
        return ~rollout.void


@dataclass(frozen=True)
class EngineVeto:
    """Leave out trajectories with a token whose ratio π_old/μ to the engine is below `least` (public code: 1e-4)."""

    least: Annotated[float, Number(above=0, below=1)] = 1e-4

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N,) bool."""
        assert rollout.mismatch is not None  # a trainer that does not know it refuses this piece
        return ~is_vetoed(rollout.mismatch, rollout.turns, self.least)


@dataclass(frozen=True)
class EngineTurnMask:
    """Keep the turns whose geometric mean ratio π_old/μ to the engine lies in [`low`, `high`] (ROLL: 0.8 to 1.2)."""

    low: Annotated[float, NOT_NEGATIVE] = 0.8
    high: Annotated[float, NOT_NEGATIVE] = 1.2

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N, T) bool, True off the model tokens."""
        assert rollout.mismatch is not None
        inside = within(turn_mismatch(rollout.mismatch, rollout.turns), self.low, self.high)
        return turn_broadcast(inside.long(), rollout.turns).bool() | ~rollout.turns.loss_mask


def _in_groups(rollout: ScoredRollout, reward: str | None, group_filter: str, share: float = 1.0) -> Tensor:
    spread = group_spread(rollout.totals(reward), rollout.num_generations)
    return torch.repeat_interleave(kept_groups(spread, group_filter, share), rollout.num_generations)
