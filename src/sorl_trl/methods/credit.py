"""Credit: the advantage of each turn, from a comparison with its group."""

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
from sorl_trl.ops.advantages import STD_FLOOR


@dataclass(frozen=True)
class GroupMean:
    """SO-GRPO's credit: the return of each turn, compared with that of its group's turns of the same index.

    With only outcome rewards and γ = 1, these are GRPO's advantages, so TRL's own are used.
    """

    def __call__(self, rollout: ScoredRollout) -> Tensor | None:
        """(N, K) advantages, or None for TRL's own."""
        if rollout.gamma == 1.0 and not rollout.has_turn_reward.any():
            return None
        return _group_mean(rollout)


@dataclass(frozen=True)
class LeaveOneOut:
    """LOOP's credit: the return of each turn, compared with the group's other trajectories.

    It does not divide by a standard deviation: `scale_rewards` must be "none". Source: arXiv 2502.01600, public code.
    """

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N, K) advantages."""
        return leave_one_out_advantages(rollout.returns, rollout.turn_mask, rollout.num_generations)


@dataclass(frozen=True)
class GiGPO:
    """GiGPO's credit (arXiv 2505.10978, from public code): the group's advantage plus `coef` times the step's.

    The step's advantage compares a turn with the turns of its group that start in the same state.
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
    """IGPO's credit (arXiv 2510.14967): turn rewards and outcomes are normalized separately, discounted and added."""

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
    return advantages / (turn_std(returns, rollout.turn_mask, len(returns)) + STD_FLOOR)
