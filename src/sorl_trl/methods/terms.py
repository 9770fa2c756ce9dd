"""Terms, which are added to the loss beside the surrogate. Each is a mean over the trajectories of the micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sorl_trl.checks import NOT_NEGATIVE, OneOf, check_fields
from sorl_trl.methods.data import Metrics, MicroBatch
from sorl_trl.ops import (
    PENALTY_ESTIMATORS,
    PENALTY_GATES,
    clip_fraction,
    gated_kl,
    good_trajectories,
    likelihood_falls,
    turn_clip_fraction,
)


@dataclass(frozen=True)
class ClipPenalty:
    """A gated penalty on the KL to the old policy, λ mean_i f_i KL_i.

    SORL's clipping-triggered penalty, as specified (docs/paper_to_code.md), has the clip range as the gate's range,
    `epsilon=None`, and leaves λ open. The defaults are our choice (docs/results.md): their gate counts tokens that
    have moved far, whether or not the surrogate clips them.

    Args:
        coef: λ, at least 0.
        gate: f_i, the factor of a trajectory's KL. "token": the share of its tokens whose ratio is outside the gate's
            range; "turn": the share of its turns; "none": 1, which makes a plain KL penalty.
        epsilon: How far a ratio may fall below 1, and rise above it, before the gate counts it. None takes the clip
            range (`epsilon`, `epsilon_high` of the config), as specified.
        epsilon_high: How far a ratio may rise above 1; None takes `epsilon`.
        kl_estimator: "unbiased", "k2" or "k3" (`ops.kl_to_old`). Not "k1", whose gradient has the mean of that of
            −KL(π_old ‖ π_θ) and drives the policies apart.
    """

    coef: Annotated[float, NOT_NEGATIVE] = 1.0
    gate: Annotated[str, OneOf(PENALTY_GATES)] = "token"
    epsilon: Annotated[float | None, NOT_NEGATIVE] = 0.2
    epsilon_high: Annotated[float | None, NOT_NEGATIVE] = None
    kl_estimator: Annotated[str, OneOf(PENALTY_ESTIMATORS)] = "unbiased"

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """λ times the mean penalty, and the metrics `clip_penalty` and `clip_penalty_gate`."""
        gate = self._gate(batch)
        of_trajectories = gated_kl(gate, batch.log_ratio, batch.loss_mask, self.kl_estimator)
        mean = of_trajectories.mean() * batch.row_scale
        return self.coef * mean, {"clip_penalty": mean, "clip_penalty_gate": gate.mean()}

    def _gate(self, batch: MicroBatch) -> Tensor:
        """(B,) f_i, without gradient."""
        if self.gate == "none":
            return batch.log_ratio.new_ones(len(batch.log_ratio))
        low, high, _ = batch.token_range
        low = low if self.epsilon is None else self.epsilon
        own_high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        high = high if own_high is None else own_high
        if self.gate == "token":
            return clip_fraction(batch.log_ratio, batch.loss_mask, low, high)
        if self.epsilon is None and self.epsilon_high is None:
            low, high, _ = batch.turn_range
        return turn_clip_fraction(batch.log_ratio, batch.turns, low, high, batch.turn_ratio)


@dataclass(frozen=True)
class LLDS:
    """LLDS's guard (arXiv 2512.04220) against drops in likelihood of good trajectories: coef (1/N) Σ_i Σ_k F_{i,k}.

    Before the first update on a rollout, and in evaluation, the policy is the old policy and the term is 0, because
    two forward passes differ only by rounding.
    """

    coef: Annotated[float, NOT_NEGATIVE] = 0.2

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """The term, and the metrics `llds/loss` and `llds/open_turns`."""
        may_fall = batch.has_moved and batch.good_tokens is not None
        log_ratio = batch.log_ratio if may_fall else torch.zeros_like(batch.log_ratio)
        good = good_trajectories(batch.advantages, batch.loss_mask)
        falls, has_fallen = likelihood_falls(log_ratio, batch.turns, good)
        tokens = 1 if batch.good_tokens is None else batch.good_tokens.clamp(min=1)
        value = falls.sum() / (tokens * batch.share)
        open_turns = (has_fallen.float(), batch.turns.turn_mask & good.unsqueeze(1))
        return self.coef * value, {"llds/loss": value, "llds/open_turns": open_turns}
