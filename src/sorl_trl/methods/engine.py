"""A correction for engine mismatch: the engine has the trainer's weights, but computes other log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from sorl_trl.checks import NOT_NEGATIVE, Checked
from sorl_trl.ops import TurnLayout, turn_broadcast, turn_mismatch

__all__ = ["TurnRatio"]


@dataclass(frozen=True)
class TurnRatio(Checked):
    """Weight each turn by g_k = exp(mean_{t∈k} d_t), clamped to [`low`, `high`] if these are set.

    d_t = log π_old − log μ with μ the engine. With `high=2`, this is slime's truncation per turn.
    """

    low: Annotated[float | None, NOT_NEGATIVE] = None
    high: Annotated[float | None, NOT_NEGATIVE] = None

    def check(self, method: Any, config: Any) -> None:
        """Raise ValueError if the policy that sampled is the old policy, as far as the trainer knows."""
        knows_another = config.async_staleness or (config.use_vllm and config.vllm_importance_sampling_correction)
        if config.compares_with_sampler or not knows_another:
            raise ValueError(
                f"`method` has {self!r}, which compares the old policy with the sampling policy. Here they are the "
                "same: use it with `use_vllm` and `vllm_importance_sampling_correction`, or with asynchronous "
                "rollouts and `async_old_policy='proximal'`."
            )

    def __call__(self, mismatch: Tensor, turns: TurnLayout) -> Tensor:
        """(B, T) weights, 1 outside model tokens."""
        ratio = turn_mismatch(mismatch, turns)
        ratio = ratio if self.low is None and self.high is None else ratio.clamp(self.low, self.high)
        return torch.where(turns.loss_mask, turn_broadcast(ratio, turns), 1.0)
