"""Credit: what each turn of a trajectory is worth, compared with its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from sorl_trl.checks import NOT_NEGATIVE, check_fields
from sorl_trl.methods.data import ScoredRollout
from sorl_trl.ops import (
    group_turn_advantages,
    leave_one_out_advantages,
    separate_turn_advantages,
    state_advantages,
    turn_std,
)


@dataclass(frozen=True)
class GroupMean:
    """SO-GRPO's: returns of turns less the group's mean.

    With outcome rewards alone and γ = 1 they are GRPO's advantages, and TRL's own are taken.
    """

    def __call__(self, rollout: ScoredRollout) -> Tensor | None:
        """(N, K) advantages, or None for TRL's own."""
        if rollout.gamma == 1.0 and not rollout.has_turn_reward.any():
            return None
        return _group_mean(rollout)


@dataclass(frozen=True)
class LeaveOneOut:
    """LOOP's (arXiv 2502.01600, as read in public code): returns less the mean of the group's other trajectories.

    It divides by no standard deviation: `scale_rewards` must be "none".
    """

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N, K) advantages."""
        return leave_one_out_advantages(rollout.returns, rollout.turn_mask, rollout.num_generations)


@dataclass(frozen=True)
class GiGPO:
    """GiGPO's (arXiv 2505.10978, as read in public code): the group's advantage plus `coef` times the step's.

    A step is compared with the steps of its group that start in the same state.
    """

    coef: Annotated[float, NOT_NEGATIVE] = 1.0

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N, K) advantages."""
        returns, mask = rollout.returns, rollout.turn_mask
        of_states = state_advantages(returns, rollout.states, mask, rollout.num_generations, rollout.scale == "group")
        return _group_mean(rollout) + self.coef * _over_batch(of_states, rollout)


@dataclass(frozen=True)
class Separate:
    """IGPO's (arXiv 2510.14967): turn rewards and outcomes are normalized apart, then discounted and added."""

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N, K) advantages."""
        outcomes = rollout.outcome_on_last_turn
        kinds = [
            (rollout.turn_rewards, rollout.has_turn_reward),
            (outcomes, rollout.is_last_turn & rollout.has_outcome.unsqueeze(1)),
        ]
        mask = rollout.turn_mask.float()
        return separate_turn_advantages(kinds, mask, rollout.num_generations, rollout.gamma, rollout.scale)


def _group_mean(rollout: ScoredRollout) -> Tensor:
    scale = rollout.scale == "group"
    advantages = group_turn_advantages(rollout.returns, rollout.turn_mask, rollout.num_generations, scale)
    return _over_batch(advantages, rollout)


def _over_batch(advantages: Tensor, rollout: ScoredRollout) -> Tensor:
    """The advantages, divided by the spread of the batch's returns where `scale_rewards` is "batch"."""
    if rollout.scale != "batch":
        return advantages
    returns = rollout.returns
    return advantages / (turn_std(returns, rollout.turn_mask, len(returns)) + 1e-4)
