"""How rewards become advantages: comparisons within a group, and GAE, which needs a critic; and who is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from sorl_trl.checks import NOT_NEGATIVE, SHARE, SWITCH, Checked, OneOf
from sorl_trl.methods.data import ScoredRollout
from sorl_trl.ops import (
    TurnLayout,
    differing_groups,
    group_spread,
    group_turn_advantages,
    leave_one_out_advantages,
    matched_advantages,
    outcome_advantages,
    summed_advantages,
    token_gae,
    turn_layout,
    turn_reduce,
    turn_starts,
    turn_std,
    whiten,
)
from sorl_trl.ops.advantages import STD_FLOOR

if TYPE_CHECKING:
    from sorl_trl.methods.method import Method


SCALES = OneOf(("group", "batch", "none"))
"""TRL's `scale_rewards`: whose spread divides an advantage, if any."""


@dataclass(frozen=True)
class GroupMean(Checked):
    """GRPO's credit (arXiv 2402.03300): a trajectory's reward, compared with those of its group.

    With rewards for turns or γ below 1, it compares a turn's return with the group's turns of the same index.

    Args:
        scale: Divide by the standard deviation of the "group" or of the "batch", or by none, as TRL's `scale_rewards`.
        aggregation: TRL's `multi_objective_aggregation` of several reward functions.
    """

    scale: Annotated[str, SCALES] = "group"
    aggregation: Annotated[str, OneOf(("sum_then_normalize", "normalize_then_sum"))] = "sum_then_normalize"

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N,) advantages of trajectories, TRL's own, or (N, K) of turns."""
        if rollout.gamma == 1.0 and not rollout.has_turn_reward.any():
            return self.of_outcomes(rollout)[0]
        if self.aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation` is {self.aggregation!r}, but rewards for turns and `gamma` below 1 "
                "need 'sum_then_normalize'."
            )
        return group_mean_advantages(rollout, self.scale)

    def of_outcomes(self, rollout: ScoredRollout) -> tuple[Tensor, Tensor]:
        """(N,) TRL's advantages, and the standard deviations that show where rewards differ."""
        if self.aggregation == "normalize_then_sum":
            return summed_advantages(rollout.rewards_per_func, rollout.reward_weights, rollout.num_generations)
        return outcome_advantages(rollout.totals(), rollout.num_generations, self.scale)


def group_mean_advantages(rollout: ScoredRollout, scale: str) -> Tensor:
    """`group_turn_advantages` of a rollout: (N, K)."""
    by_group = scale == "group"
    advantages = group_turn_advantages(rollout.returns, rollout.turn_mask, rollout.num_generations, by_group)
    return over_batch(advantages, rollout, scale)


def over_batch(advantages: Tensor, rollout: ScoredRollout, scale: str) -> Tensor:
    """The advantages, divided by the spread of the batch's returns if `scale` is "batch": (N, K)."""
    if scale != "batch":
        return advantages
    returns = rollout.returns
    return advantages / (turn_std(returns, rollout.turn_mask, len(returns)) + STD_FLOOR)


@dataclass(frozen=True)
class LeaveOneOut:
    """LOOP's credit: the return of each turn, compared with the group's other trajectories.

    It does not divide by a standard deviation, which would blow up small differences in groups that nearly agree.
    Source: the public code of arXiv 2502.01600, which samples six trajectories per group. The comparison of turns is
    our addition.
    """

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N, K) advantages."""
        return leave_one_out_advantages(rollout.returns, rollout.turn_mask, rollout.num_generations)


@dataclass(frozen=True)
class GiGPO(Checked):
    """GiGPO's credit (arXiv 2505.10978, from public code): the group's advantage plus `coef` times the step's.

    The step's advantage compares a turn with the turns of its group that start in the same state: after the same
    observation, or at the prompt. A state that occurs once adds nothing. `gamma` discounts both advantages; the source
    discounts only the step's.
    """

    coef: Annotated[float, NOT_NEGATIVE] = 1.0
    scale: Annotated[str, SCALES] = "group"

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N, K) advantages."""
        by_group, group = self.scale == "group", rollout.num_generations
        state_credit = matched_advantages(rollout.returns, rollout.states, rollout.turn_mask, group, by_group)
        of_group = group_mean_advantages(rollout, self.scale)
        return of_group + self.coef * over_batch(state_credit, rollout, self.scale)


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


# -------------------------------------------------------------------------------------------------------------------
# With a critic
# -------------------------------------------------------------------------------------------------------------------


class Experience(NamedTuple):
    """GAE's results for each unit of N trajectories, (N, U)."""

    units: TurnLayout
    """The time steps."""
    values: Tensor
    """V of the unit before any update."""
    advantages: Tensor
    """Not whitened."""
    returns: Tensor
    """The critic's targets, Â + V."""
    rewards_to_go: Tensor
    """Discounted sum of rewards from this unit on."""
    mask: Tensor
    """bool, True where there is a unit."""


@dataclass(frozen=True)
class GAE(Checked):
    """Generalized advantage estimation (arXiv 1506.02438), with a critic.

    Args:
        level: The unit that is one time step for critic and GAE, and shares an advantage: "turn" or "token".
            Observations are skipped. The critic is read before a unit's first token.
        lam: λ. 1 relies only on the rewards; a lower value relies more on the critic.
        whiten: Scale the advantages of each rollout to mean 0 and variance 1, over all processes.
    """

    level: Annotated[str, OneOf(("turn", "token"))] = "turn"
    lam: Annotated[float, SHARE] = 1.0
    whiten: Annotated[bool, SWITCH] = True
    needs_values: ClassVar[bool] = True

    def __call__(self, rewards: Tensor, values: Tensor, turn_ids: Tensor, gamma: float) -> Experience:
        """What is made of (N, T) rewards, each turn's on its last token, summed within a unit; and of values.

        `values` (N, T) are V of the state before each token; a unit's is that before its first. `gamma` is the
        discount per unit.
        """
        units = self.units(turn_ids)
        of_units, mask = turn_reduce(rewards, units, "sum"), units.lengths > 0
        first = torch.where(turn_starts(units.turn_ids), units.turn_ids, -1)
        values = turn_reduce(values, turn_layout(first, units.num_turns))
        advantages, returns = token_gae(of_units, values, mask, gamma, self.lam)
        _, rewards_to_go = token_gae(of_units, torch.zeros_like(values), mask, gamma, 1.0)
        return Experience(units, values, advantages, returns, rewards_to_go, mask)

    def scaled(self, experience: Experience) -> Tensor:
        """(N, U) advantages, whitened if asked."""
        return whiten(experience.advantages, experience.mask) if self.whiten else experience.advantages

    def units(self, turn_ids: Tensor) -> TurnLayout:
        """The time steps of critic and GAE: turns, or the policy's tokens."""
        if self.level == "turn":
            return turn_layout(turn_ids)
        positions = torch.arange(turn_ids.size(1), device=turn_ids.device)
        return turn_layout(torch.where(turn_ids >= 0, positions, -1), turn_ids.size(1))

    def valued(self, turn_ids: Tensor) -> Tensor:
        """(B, T) bool: the tokens before which the critic's value is trained."""
        return turn_starts(turn_ids) if self.level == "turn" else turn_ids >= 0


# -------------------------------------------------------------------------------------------------------------------
# What is trained on
# -------------------------------------------------------------------------------------------------------------------


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
