"""SORL (arXiv 2511.20718): SO-GRPO and SO-PPO from version 2, and ST-PPO and its variants from version 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from sorl_trl.checks import NOT_NEGATIVE, Checked
from sorl_trl.methods.credit import GAE
from sorl_trl.methods.data import Clip, Metrics, MicroBatch, Ratio
from sorl_trl.methods.losses import trajectory_mean
from sorl_trl.methods.method import Method
from sorl_trl.ops import clip_fraction, gated_kl

__all__ = ["SO_GRPO", "SO_GRPO_NOTE", "SO_PPO", "SO_PPO_NOTE", "ST_GRPO", "ST_PPO", "S_PPO", "TURN_PPO", "ClipPenalty"]


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


SO_GRPO = Method(
    terms=(ClipPenalty(),),
    name="so_grpo",
    source="SORL, arXiv 2511.20718 v2, from its abstract and a summary; we chose clip range and gate",
)
SO_PPO = replace(SO_GRPO, credit=GAE(), name="so_ppo")
SO_GRPO_NOTE = Method(
    ratio=Ratio(average="arithmetic"),
    clip=Clip(0.2, by_length=False),
    terms=(ClipPenalty(coef=3.0, epsilon=None),),
    target_kl=0.0,
    name="so_grpo_note",
    source="SORL, arXiv 2511.20718 v2, as specified in a summary; we chose λ and the KL's estimator",
)
SO_PPO_NOTE = replace(SO_GRPO_NOTE, credit=GAE(), name="so_ppo_note")

ST_GRPO = Method(
    clip=Clip(0.2, by_length=False),
    mean=trajectory_mean,
    target_kl=0.0,
    bias_norm=True,
    name="st_grpo",
    source="our variant of ST-PPO, arXiv 2511.20718 v1",
)
ST_PPO = replace(
    ST_GRPO, credit=GAE("token"), name="st_ppo", source="ST-PPO, arXiv 2511.20718 v1, from its abstract and reviews"
)
TURN_PPO = replace(
    ST_PPO, bias_norm=False, name="turn_ppo", source="Turn-PPO, arXiv 2511.20718 v1, from its abstract and reviews"
)
S_PPO = replace(
    ST_PPO, ratio=Ratio("token"), name="s_ppo", source="S-PPO, arXiv 2511.20718 v1, from its abstract and reviews"
)
