"""LLDS: GRPO with a guard against drops in the likelihood of good trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sorl_trl.checks import NOT_NEGATIVE, Checked
from sorl_trl.methods.data import Metrics, MicroBatch
from sorl_trl.methods.method import GRPO, Method
from sorl_trl.ops import good_trajectories, likelihood_falls

__all__ = ["GUARDED_GRPO", "LLDS"]


@dataclass(frozen=True)
class LLDS(Checked):
    """LLDS's guard (arXiv 2512.04220) against drops in likelihood of good trajectories: coef (1/N) Σ_i Σ_k F_{i,k}.

    Before the first update on a rollout, and in evaluation, the policy is the old policy and the term is 0, because
    two forward passes differ only by rounding.
    """

    coef: Annotated[float, NOT_NEGATIVE] = 0.2

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


GUARDED_GRPO = Method(
    terms=(LLDS(),),
    name="llds",
    settings=GRPO.settings,
    source="LLDS, arXiv 2512.04220, from the paper and public code",
)
