"""The mean of a method: from one number per token, or per state that the critic values, to one per micro-batch.

Each is called with (B, T) values, a mask of what counts, the number of positions that count in the whole generation
batch, and the micro-batch. Means over trajectories are multiplied by `row_scale`, so dropped ones do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from sorl_trl.checks import POSITIVE_COUNT, Checked
from sorl_trl.methods.data import MicroBatch
from sorl_trl.ops import turn_layout, turn_weights

__all__ = ["ConstantMean", "MicroBatchMean", "TokenMean", "TokenSum", "TrajectoryMean", "TurnMean"]

Mean: TypeAlias = Callable[[Tensor, Tensor, Tensor, MicroBatch], Tensor]
"""Returns the mean of (B, T) values where a mask is 1, given the mask's sum over the generation batch."""


@dataclass(frozen=True)
class TurnMean:
    """Over the tokens of each turn, then over turns, then over trajectories: the SO-PPO objective."""

    def __call__(self, values: Tensor, mask: Tensor, total: Tensor, batch: MicroBatch) -> Tensor:
        """()."""
        turns = turn_layout(torch.where(mask.bool(), batch.turns.turn_ids, -1), batch.turns.num_turns)
        return TrajectoryMean()(turn_weights(turns) * values, mask, total, batch)


@dataclass(frozen=True)
class TrajectoryMean:
    """Over the tokens of each trajectory, then over trajectories: TRL's "grpo" and "sapo"."""

    def __call__(self, values: Tensor, mask: Tensor, total: Tensor, batch: MicroBatch) -> Tensor:
        """()."""
        return (_kept(values, mask).sum(1) / mask.sum(1).clamp(min=1)).mean() * batch.row_scale


@dataclass(frozen=True)
class ConstantMean(Checked):
    """The sum over tokens divided by a constant, `length` or `max_completion_length`, per trajectory: "dr_grpo"."""

    length: Annotated[int | None, POSITIVE_COUNT] = None

    def __call__(self, values: Tensor, mask: Tensor, total: Tensor, batch: MicroBatch) -> Tensor:
        """()."""
        return _kept(values, mask).sum() / (len(values) * (self.length or batch.longest)) * batch.row_scale


@dataclass(frozen=True)
class TokenMean:
    """Over the tokens of the whole generation batch: TRL's "dapo", "cispo" and "vespo"."""

    def __call__(self, values: Tensor, mask: Tensor, total: Tensor, batch: MicroBatch) -> Tensor:
        """()."""
        return _kept(values, mask).sum() / (total.clamp(min=1) * batch.share)


@dataclass(frozen=True)
class MicroBatchMean:
    """Over the tokens of the micro-batch: TRL's "bnpo"."""

    def check(self, method: Any, config: Any) -> None:
        """Raise ValueError if the method drops something, which this cannot leave out of its denominator."""
        if method.keep:
            raise ValueError(
                f"`mean` is {self!r}, a mean over a micro-batch's tokens, which cannot leave out what `keep` drops: "
                "use TokenMean() (`loss_type` 'dapo'), which averages over the whole rollout's tokens, or another."
            )

    def __call__(self, values: Tensor, mask: Tensor, total: Tensor, batch: MicroBatch) -> Tensor:
        """()."""
        return _kept(values, mask).sum() / mask.sum().clamp(min=1)


@dataclass(frozen=True)
class TokenSum:
    """The sum over the tokens of each trajectory, and its mean over trajectories: TRL's "luspo"."""

    def __call__(self, values: Tensor, mask: Tensor, total: Tensor, batch: MicroBatch) -> Tensor:
        """()."""
        return _kept(values, mask).sum(1).mean() * batch.row_scale


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), values, 0.0)
