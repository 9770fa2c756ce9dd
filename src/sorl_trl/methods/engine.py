"""Corrections for engine mismatch: the engine has the trainer's weights, but computes other log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sorl_trl.checks import NOT_NEGATIVE, Checked, Number
from sorl_trl.methods.data import ScoredRollout
from sorl_trl.methods.method import Method
from sorl_trl.ops import TurnLayout, is_vetoed, turn_broadcast, turn_mismatch, within

__all__ = ["ENGINE_PIECES", "EngineTurnMask", "EngineVeto", "TurnRatio", "Unweighted"]


@dataclass(frozen=True)
class EngineVeto(Checked):
    """Leave out trajectories with a token whose ratio π_old/μ to the engine is below `least` (public code: 1e-4)."""

    least: Annotated[float, Number(above=0, below=1)] = 1e-4

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N,) bool."""
        assert rollout.mismatch is not None  # a trainer that does not know it refuses this piece
        return ~is_vetoed(rollout.mismatch, rollout.turns, self.least)


@dataclass(frozen=True)
class EngineTurnMask(Checked):
    """Keep the turns whose geometric mean ratio π_old/μ to the engine lies in [`low`, `high`] (ROLL: 0.8 to 1.2)."""

    low: Annotated[float, NOT_NEGATIVE] = 0.8
    high: Annotated[float, NOT_NEGATIVE] = 1.2

    def __call__(self, rollout: ScoredRollout) -> Tensor:
        """(N, T) bool, True outside model tokens."""
        assert rollout.mismatch is not None
        inside = within(turn_mismatch(rollout.mismatch, rollout.turns), self.low, self.high)
        return turn_broadcast(inside.long(), rollout.turns).bool() | ~rollout.turns.loss_mask


@dataclass(frozen=True)
class TurnRatio(Checked):
    """Weight each turn by g_k = exp(mean_{t∈k} d_t), clamped to [`low`, `high`] if these are set.

    d_t = log π_old − log μ with μ the engine. With `high=2`, this is slime's truncation per turn. Without bounds,
    combine it with `EngineTurnMask`.
    """

    low: Annotated[float | None, NOT_NEGATIVE] = None
    high: Annotated[float | None, NOT_NEGATIVE] = None

    def __call__(self, mismatch: Tensor, turns: TurnLayout) -> Tensor:
        """(B, T) weights, 1 outside model tokens."""
        ratio = turn_mismatch(mismatch, turns)
        ratio = ratio if self.low is None and self.high is None else ratio.clamp(self.low, self.high)
        return torch.where(turns.loss_mask, turn_broadcast(ratio, turns), 1.0)


@dataclass(frozen=True)
class Unweighted:
    """No weights, for surrogates with ratios that already compare with the policy that sampled."""

    def __call__(self, mismatch: Tensor, turns: TurnLayout) -> Tensor:
        """(B, T) ones."""
        return torch.ones_like(mismatch)


ENGINE_PIECES = Method(keep=(EngineVeto(), EngineTurnMask()), weight=TurnRatio())
"""Not a named method: it only makes this file's pieces available to recipes."""
