"""SORL (arXiv 2511.20718): SO-GRPO and SO-PPO from version 2, and ST-PPO and its variants from version 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from sorl_trl.checks import NOT_NEGATIVE, Checked, OneOf
from sorl_trl.methods.data import Metrics, MicroBatch
from sorl_trl.methods.method import Method
from sorl_trl.ops import PENALTY_ESTIMATORS, PENALTY_GATES, clip_fraction, gated_kl, turn_clip_fraction

__all__ = ["SO_GRPO", "SO_GRPO_NOTE", "SO_PPO", "SO_PPO_NOTE", "ST_GRPO", "ST_PPO", "S_PPO", "TURN_PPO", "ClipPenalty"]


@dataclass(frozen=True)
class ClipPenalty(Checked):
    """A gated penalty on the KL to the old policy, λ mean_i f_i KL_i.

    SORL's clipping-triggered penalty, as specified (docs/internals/equations.md), uses the clip range as the gate's
    range (`epsilon=None`) and leaves λ open. The defaults are our choice (docs/evidence/results.md): their gate counts
    tokens that have moved far, whether or not the surrogate clips them.

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

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """λ times the mean penalty, and the metrics `clip_penalty` and `clip_penalty_gate`."""
        gate = self._gate(batch)
        penalties = gated_kl(gate, batch.log_ratio, batch.loss_mask, self.kl_estimator)
        mean = penalties.mean() * batch.row_scale
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


SO_GRPO = Method(
    terms=(ClipPenalty(),),
    name="so_grpo",
    source="SORL, arXiv 2511.20718 v2, from its abstract and a summary; we chose clip range and gate",
)
SO_PPO = replace(SO_GRPO, name="so_ppo")
SO_GRPO_NOTE = Method(
    terms=(ClipPenalty(coef=3.0, epsilon=None),),
    name="so_grpo_note",
    settings={"turn_ratio": "arithmetic", "epsilon": 0.2, "scale_clip_range": False, "target_kl": 0.0},
    source="SORL, arXiv 2511.20718 v2, as specified in a summary; we chose λ and the KL's estimator",
)
SO_PPO_NOTE = replace(SO_GRPO_NOTE, name="so_ppo_note")

ST_GRPO = Method(
    name="st_grpo",
    settings={"loss_type": "grpo", "epsilon": 0.2, "scale_clip_range": False, "bias_norm": True, "target_kl": 0.0},
    source="our variant of ST-PPO, arXiv 2511.20718 v1",
)
ST_PPO = Method(
    name="st_ppo",
    settings=ST_GRPO.settings | {"advantage_level": "token"},
    source="ST-PPO, arXiv 2511.20718 v1, from its abstract and reviews",
)
TURN_PPO = Method(
    name="turn_ppo",
    settings=ST_PPO.settings | {"bias_norm": False},
    source="Turn-PPO, arXiv 2511.20718 v1, from its abstract and reviews",
)
S_PPO = Method(
    name="s_ppo",
    settings=ST_PPO.settings | {"importance_sampling_level": "token"},
    source="S-PPO, arXiv 2511.20718 v1, from its abstract and reviews",
)
