"""The pieces of a loss: surrogates and means, of which TRL's loss types are made, and a term."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from sorl_trl.checks import NOT_NEGATIVE, Checked, Number
from sorl_trl.methods.data import Metrics, MicroBatch, Objective
from sorl_trl.ops import (
    cispo_surrogate,
    clip_fraction,
    clipped_surrogate,
    gated_kl,
    is_clipped,
    sapo_surrogate,
    turn_layout,
    turn_weights,
    vespo_surrogate,
    vespo_weights,
)

Mean: TypeAlias = Callable[[Tensor, Tensor, Tensor, MicroBatch], Tensor]
"""Returns the mean of (B, T) values where a mask is 1, from its sum over the generation batch and the micro-batch.

A mean over trajectories is multiplied by `row_scale`, so dropped ones do not count."""


@dataclass(frozen=True)
class PPOMin:
    """PPO's min(w Â, clip(w, 1 − ε_low, 1 + ε_high) Â) (arXiv 1707.06347), with TRL's `delta` if that is set."""

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token with the ratio of its unit."""
        ratio = batch.ratio
        value = clipped_surrogate(ratio, batch.advantages, *batch.clip_range)
        return Objective(value, is_clipped(ratio.detach(), batch.advantages, *batch.clip_range))


class Soft(Checked):
    """A surrogate that never stops a gradient."""


@dataclass(frozen=True)
class CISPO(Soft):
    """CISPO's sg[min(w, cap)] Â log π_θ (arXiv 2506.13585). In TRL, `epsilon_high` is the cap."""

    cap: Annotated[float, Number(above=0, finite=False)] = 5.0

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token, and the share of ratios above the cap."""
        ratio = batch.ratio.detach()
        is_capped = ((ratio > self.cap) & (batch.advantages > 0)).float()
        value = cispo_surrogate(ratio, batch.advantages, batch.logps, self.cap)
        return Objective(value, None, {"cispo_clip_ratio": batch.per_unit(is_capped)})


@dataclass(frozen=True)
class SAPO(Soft):
    """SAPO's (4/τ) σ(τ (w − 1)) Â (arXiv 2511.20347), with τ by the sign of the advantage."""

    temperature_pos: Annotated[float, Number(above=0)] = 1.0
    temperature_neg: Annotated[float, Number(above=0)] = 1.05

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token."""
        value = sapo_surrogate(batch.ratio, batch.advantages, self.temperature_pos, self.temperature_neg)
        return Objective(value, None)


@dataclass(frozen=True)
class VESPO(Soft):
    """VESPO's sg[φ(w)] Â log π_θ, where φ(w) = e^λ w^k e^{−λ w} weighs a sequence by its ratio, as in TRL.

    The ratio contains the engine's mismatch, so that no further weights multiply it.
    """

    k_pos: Annotated[float, NOT_NEGATIVE] = 2.0
    lambda_pos: Annotated[float, NOT_NEGATIVE] = 3.0
    k_neg: Annotated[float, NOT_NEGATIVE] = 3.0
    lambda_neg: Annotated[float, NOT_NEGATIVE] = 2.0

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token, and the mean of φ."""
        powers, decays = (self.k_pos, self.k_neg), (self.lambda_pos, self.lambda_neg)
        engine = batch.inputs.get("importance_sampling_ratio")
        weight = vespo_weights(batch.log_ratio, batch.loss_mask, batch.advantages, powers, decays, engine)
        shown = (weight, torch.ones_like(weight)) if weight.size(1) == 1 else (weight, batch.loss_mask)
        value = vespo_surrogate(weight, batch.advantages, batch.logps)
        return Objective(value, None, {"vespo/phi_seq_mean": shown}, is_weighted=True)


# -------------------------------------------------------------------------------------------------------------------
# Means
# -------------------------------------------------------------------------------------------------------------------


def turn_mean(values: Tensor, mask: Tensor, total: Tensor, batch: MicroBatch) -> Tensor:
    """Over the tokens of each turn, then over turns, then over trajectories: the SO-PPO objective."""
    turns = turn_layout(torch.where(mask.bool(), batch.turns.turn_ids, -1), batch.turns.num_turns)
    return trajectory_mean(turn_weights(turns) * values, mask, total, batch)


def trajectory_mean(values: Tensor, mask: Tensor, total: Tensor, batch: MicroBatch) -> Tensor:
    """Over the tokens of each trajectory, then over trajectories: TRL's "grpo" and "sapo"."""
    return (_kept(values, mask).sum(1) / mask.sum(1).clamp(min=1)).mean() * batch.row_scale


def token_sum(values: Tensor, mask: Tensor, total: Tensor, batch: MicroBatch) -> Tensor:
    """The sum over the tokens of each trajectory, then over trajectories: TRL's "luspo"."""
    return _kept(values, mask).sum(1).mean() * batch.row_scale


def constant_mean(values: Tensor, mask: Tensor, total: Tensor, batch: MicroBatch) -> Tensor:
    """The sum over tokens, divided by `max_completion_length` for each trajectory: TRL's "dr_grpo"."""
    return _kept(values, mask).sum() / (len(values) * batch.longest) * batch.row_scale


def token_mean(values: Tensor, mask: Tensor, total: Tensor, batch: MicroBatch) -> Tensor:
    """Over the tokens of the whole generation batch: TRL's "dapo", "cispo" and "vespo"."""
    return _kept(values, mask).sum() / (total.clamp(min=1) * batch.share)


def micro_batch_mean(values: Tensor, mask: Tensor, total: Tensor, batch: MicroBatch) -> Tensor:
    """Over the tokens of the micro-batch: TRL's "bnpo". It cannot leave out what `keep` drops."""
    return _kept(values, mask).sum() / mask.sum().clamp(min=1)


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), values, 0.0)


# -------------------------------------------------------------------------------------------------------------------
# Terms
# -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClipPenalty(Checked):
    """A gated penalty on the KL to the old policy, λ mean_i f_i KL_i.

    SORL's clipping-triggered penalty, as specified (docs/internals/equations.md), uses the clip range as the gate's
    range (`epsilon=None`) and leaves λ open. The defaults are our choice (docs/evidence/results.md): their gate counts
    tokens that have moved far, whether or not the surrogate clips them.

    Args:
        coef: λ, at least 0. f_i is the share of a trajectory's tokens whose ratio is outside the gate's range.
        epsilon: How far a ratio may fall below 1, and rise above it, before the gate counts it. None takes the clip
            range of the method, as specified.
    """

    coef: Annotated[float, NOT_NEGATIVE] = 1.0
    epsilon: Annotated[float | None, NOT_NEGATIVE] = 0.2

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """λ times the mean penalty, and the metrics `clip_penalty` and `clip_penalty_gate`."""
        low, high = batch.token_range[:2] if self.epsilon is None else (self.epsilon, self.epsilon)
        gate = clip_fraction(batch.log_ratio, batch.loss_mask, low, high)
        mean = gated_kl(gate, batch.log_ratio, batch.loss_mask).mean() * batch.row_scale
        return self.coef * mean, {"clip_penalty": mean, "clip_penalty_gate": gate.mean()}
