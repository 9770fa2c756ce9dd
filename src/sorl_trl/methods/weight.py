"""Weight: how the loss corrects for an engine whose log-probabilities differ from the trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sorl_trl.checks import NOT_NEGATIVE, check_fields
from sorl_trl.ops import TurnLayout, turn_broadcast, turn_mismatch


@dataclass(frozen=True)
class TurnRatio:
    """Weight each turn by g_k = exp(mean_{t∈k} d_t), clamped to [`low`, `high`] if these are set.

    d_t = log π_old − log μ with μ the engine. With `high=2`, this is slime's truncation per turn. Without bounds, it
    goes with `EngineTurnMask`.
    """

    low: Annotated[float | None, NOT_NEGATIVE] = None
    high: Annotated[float | None, NOT_NEGATIVE] = None

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, mismatch: Tensor, turns: TurnLayout) -> Tensor:
        """(B, T) weights, 1 off the model tokens."""
        ratio = turn_mismatch(mismatch, turns)
        ratio = ratio if self.low is None and self.high is None else ratio.clamp(self.low, self.high)
        return torch.where(turns.loss_mask, turn_broadcast(ratio, turns), 1.0)


@dataclass(frozen=True)
class Unweighted:
    """No weights, for surrogates whose ratio already compares with the policy that sampled."""

    def __call__(self, mismatch: Tensor, turns: TurnLayout) -> Tensor:
        """(B, T) ones."""
        return torch.ones_like(mismatch)
