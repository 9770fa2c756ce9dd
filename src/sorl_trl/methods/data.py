"""The inputs of a method's pieces: a scored rollout, and a micro-batch with its ratios and their clip range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sorl_trl.checks import SWITCH, Checked, Number, OneOf
from sorl_trl.ops import (
    IMPORTANCE_SAMPLING_LEVELS,
    TURN_RATIOS,
    TurnLayout,
    importance_ratio,
    log_importance_ratio,
    scaled_bound,
    scaled_clip_range,
    turn_returns,
    with_own_gradients,
)

Metrics: TypeAlias = Mapping[str, Tensor | tuple[Tensor, Tensor]]
"""Scalars, or values and a mask of the same shape, by name. Their mean over all processes is logged."""


@dataclass(frozen=True)
class ScoredRollout:
    """N trajectories of all processes, group by group, with at most K turns and T completion tokens each."""

    turns: TurnLayout
    """Where the turns lie, as they were generated."""
    rewards_per_func: Tensor
    """(N, F) one reward per trajectory and reward function, NaN where the function gave none."""
    reward_names: Sequence[str]
    """The names of the F reward functions."""
    reward_weights: Tensor
    """(F,) the weight of each."""
    turn_rewards: Tensor
    """(N, K) the weighted sum of the turn rewards, 0 where there is none."""
    has_turn_reward: Tensor
    """(N, K) bool, whether there is any."""
    outcomes: Tensor
    """(N,) the weighted sum of the outcome rewards, 0 where there is none."""
    states: Tensor
    """(N, K) int64, a number for the state in which each turn starts: the last observation, or the prompt."""
    num_generations: int
    """G, the trajectories of a group."""
    gamma: float
    """The discount per turn."""
    agents: Tensor | None = None
    """(N, K) int64, the number of each turn's agent in `agent_names`, -1 where there is none; None without names."""
    agent_names: tuple[str, ...] = ()
    """The agents of these trajectories, sorted. If some turns have a name, those without have the name ""."""

    @property
    def scored(self) -> Tensor:
        """(N,) bool, whether any function gave a reward."""
        return ~self.rewards_per_func.isnan().all(1)

    @property
    def turn_mask(self) -> Tensor:
        """(N, K) bool, the turns of the trajectories that have a reward."""
        return self.turns.turn_mask & self.scored.unsqueeze(1)

    @property
    def rewards(self) -> Tensor:
        """(N, K) the reward of each turn, with the outcome on the last one."""
        columns = torch.arange(self.turns.num_turns, device=self.turns.counts.device)
        is_last = columns == self.turns.counts.unsqueeze(1) - 1
        return self.turn_rewards + torch.where(is_last, self.outcomes.unsqueeze(1), 0.0)

    @property
    def returns(self) -> Tensor:
        """(N, K) R_k = Σ_{j≥k} γ^{j−k} r_j."""
        return turn_returns(self.rewards, self.turn_mask, self.gamma)

    def totals(self, name: str | None = None) -> Tensor:
        """(N,) the rewards of the function `name`, or the weighted sum of all functions; NaN where there are none.

        Raises:
            ValueError: No reward function has that name.
        """
        if name is None:
            total = (self.rewards_per_func * self.reward_weights).nansum(1)
            return torch.where(self.scored, total, torch.nan)
        if name not in self.reward_names:
            raise ValueError(f"`reward` is {name!r}, but must be a reward function: one of {list(self.reward_names)}.")
        return self.rewards_per_func[:, list(self.reward_names).index(name)]


class ClipRange(NamedTuple):
    """How far a ratio may fall below and rise above 1 before it is clipped, and the bound `delta` of unclipped ratios.

    Floats, or (B, T) tensors with the values of each token's unit.
    """

    low: float | Tensor
    high: float | Tensor
    delta: float | Tensor | None = None


@dataclass(frozen=True)
class Ratio(Checked):
    """The importance ratio of a method.

    Args:
        level: The unit that shares one ratio: "turn", as in SORL; "token", as in PPO and GRPO; or "sequence", as in
            GSPO.
        average: How the token ratios of a turn are averaged: "geometric", exp of their mean logarithm, which is GSPO's
            length normalization applied per turn; or "arithmetic", as specified for SORL.
    """

    level: Annotated[str, OneOf(IMPORTANCE_SAMPLING_LEVELS)] = "turn"
    average: Annotated[str, OneOf(TURN_RATIOS)] = "geometric"


@dataclass(frozen=True)
class Clip(Checked):
    """The clip range of a method.

    Args:
        low: How far a ratio may fall below 1. We chose 0.28, for a turn of one token (docs/evidence/results.md).
        high: How far it may rise above 1; None takes `low`.
        delta: The bound of unclipped ratios, as in TRL; None for none.
        by_length: Our addition: divide the range of a turn of n tokens, and the distance of `delta` from 1, by
            n^(3/4). Ratios of tokens and sequences have the same range at every length.
    """

    low: Annotated[float, Number(least=0, finite=False)] = 0.28
    high: Annotated[float | None, Number(least=0, finite=False)] = None
    delta: Annotated[float | None, Number(least=0, finite=False)] = None
    by_length: Annotated[bool, SWITCH] = True

    @property
    def of_tokens(self) -> ClipRange:
        """The clip range of a token's ratio, and of a sequence's."""
        return ClipRange(self.low, self.low if self.high is None else self.high, self.delta)

    def of_turns(self, turns: TurnLayout) -> ClipRange:
        """The clip range of each turn's ratio."""
        if not self.by_length:
            return self.of_tokens
        low, high, delta = self.of_tokens
        bound = None if delta is None else scaled_bound(delta, turns)
        return ClipRange(scaled_clip_range(low, turns), scaled_clip_range(high, turns), bound)


@dataclass(frozen=True)
class MicroBatch:
    """B trajectories of at most T completion tokens, with the policy's log-probabilities."""

    logps: Tensor
    """(B, T) log π_θ of each token, with gradient."""
    old_logps: Tensor
    """(B, T) log π_old."""
    sampling_logps: Tensor
    """(B, T) log μ of the sampling engine; log π_old if the trainer does not know it."""
    log_ratio: Tensor
    """(B, T) ℓ = log π_θ − log π_old of each token, in nats, bounded, with gradient."""
    turns: TurnLayout
    """Where the turns lie."""
    advantages: Tensor
    """(B, T), or (B, 1) if all tokens of a trajectory share one; without any weights."""
    unit: Ratio
    """The unit that shares one ratio, and how a turn's are averaged."""
    clip: Clip
    """How far ratios may move."""
    longest: int = 1
    """The most tokens that a completion may have."""
    row_scale: float = 1.0
    """The factor that removes dropped trajectories from a mean over trajectories."""
    share: float = 1.0
    """The micro-batch's share of the generation batch: one over the number of micro-batches on all processes."""
    is_training: bool = True
    """Whether the policy is trained on the micro-batch, rather than evaluated."""
    step: int = 1
    """The optimizer step that the micro-batch is part of, from 1."""
    age: int | None = 0
    """The number of optimizer steps since the trajectories were sampled; None in evaluation."""
    ends_step: bool = True
    """Whether the optimizer steps after this micro-batch."""
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The batch in TRL's form."""

    @property
    def has_moved(self) -> bool:
        """Whether the policy has been updated since it was the old policy; if not, they differ only by rounding."""
        return bool(self.age)

    @property
    def loss_mask(self) -> Tensor:
        """(B, T) bool, the tokens that are trained on."""
        return self.turns.loss_mask

    @property
    def token_range(self) -> ClipRange:
        """The clip range of token ratios, and of a sequence's, in floats."""
        return self.clip.of_tokens

    @cached_property
    def turn_range(self) -> ClipRange:
        """The clip range of turn ratios."""
        return self.clip.of_turns(self.turns)

    @property
    def clip_range(self) -> ClipRange:
        """The clip range of the unit's ratios, which the surrogate clips."""
        return self.turn_range if self.unit.level == "turn" else self.token_range

    @property
    def ratio(self) -> Tensor:
        """(B, T) the importance ratio of the unit that each token belongs to, with gradient.

        If a unit's tokens have different advantages, the unit's ratio would average these. Each token then keeps its
        own gradient (GSPO-token, arXiv 2507.18071).
        """
        level, average = self.unit.level, self.unit.average
        if level == "token" or self.advantages.size(1) == 1:
            return importance_ratio(self.log_ratio, self.turns, level, average)
        unit_log_ratio = log_importance_ratio(self.log_ratio, self.turns, level, average)
        averaged = average if level == "turn" else "geometric"
        return with_own_gradients(unit_log_ratio, self.log_ratio, self.turns, averaged).exp()

    def per_unit(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) values and where to average them; one per sequence if its tokens share ratio and advantage."""
        if self.unit.level == "sequence" and self.advantages.size(1) == 1:
            of_rows = (values * self.loss_mask).amax(1)
            return of_rows, torch.ones_like(of_rows)
        return values, self.loss_mask


class Objective(NamedTuple):
    """The result of a surrogate."""

    value: Tensor
    """(B, T) the objective of each token, to be maximised."""
    stopped: Tensor | None
    """(B, T) bool, where clipping or masking removes the token's gradient; None if the surrogate never does."""
    metrics: Mapping[str, Any] = MappingProxyType({})
    """What to log."""
    is_weighted: bool = False
    """Whether `value` contains the engine's weights, which multiply it otherwise."""
