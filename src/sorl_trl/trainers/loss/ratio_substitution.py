"""The one seam through which turn ratios and our surrogate reach TRL's own loss.

`GRPOTrainer._compute_loss` forms `log_ratio = per_token_logps - old_per_token_logps` and reads advantages, the old,
reference and sampling log-probabilities from its inputs only after the forward pass. Returning substitute
log-probabilities `old + log(ratio)` from that forward pass, and shifting the reference and sampling ones by the same
amount, makes TRL's loss see the turn's ratio w while its reference KL, entropy, masks and corrections stay per token.

TRL's surrogate, when nothing is clipped, is w times the advantages. So, given S/w for the advantages and a clip range
without bounds, it is S: the surrogate of `so_loss`, in value and gradient. Nothing of TRL's 270 lines is copied;
tests/contract pins the order of reads this rests on.

The same seam bounds the log-ratio (`bounded_log_ratio`), of which TRL takes the exponential as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sorl_trl.ops import TurnLayout, bounded_log_ratio

Units = Callable[[Tensor], Tensor]
"""From (B, T) log-ratios of tokens to (B, T) log-ratios of the units that they belong to."""
Surrogate = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From (B, T) log-ratios of tokens to (B, T) surrogates and (B, T) the ratios that they are formed of."""

_LOWEST_LOGP = -1e4
"""Infinite log-probabilities are cut to this: a bounded difference cannot be put on top of infinity."""


class RatioSubstitution:
    """Substitutes ratios, and perhaps the surrogate, into one call of `GRPOTrainer._compute_loss`.

    Args:
        inputs: the batch; `self.inputs` is the shallow copy to call TRL with, the batch itself is never written to.
        turns: the turns of its B trajectories.
        units: from (B, T) log-ratios of tokens to those of their units; `None` leaves the token ratios as they are,
            but for the bound (TRL then forms its own sequence ratio, or uses them as they stand), and records them.
        surrogate: what takes the place of TRL's surrogate; `None` leaves TRL's own.
        linear: TRL's loss uses the log-probabilities linearly (CISPO, VESPO) and caps its weights itself: a ratio is
            substituted in value, each token keeps its own gradient, and nothing needs a bound.
        tracks_sampling: the off-policy mask is on, which compares with the sampling log-probabilities.
    """

    log_ratio: Tensor
    """(B, T) log-ratio of each token, bounded, with gradient; set by the forward pass."""

    def __init__(
        self,
        inputs: dict[str, Any],
        turns: TurnLayout,
        units: Units | None,
        surrogate: Surrogate | None = None,
        linear: bool = False,
        tracks_sampling: bool = False,
    ) -> None:
        self.inputs = dict(inputs)
        self.turns = turns
        self.units = units
        self.surrogate = surrogate
        self.linear = linear
        self.tracks_sampling = tracks_sampling

    def __call__(self, per_token_logps: Tensor) -> Tensor:
        """What TRL's loss gets in place of `per_token_logps` (B, T)."""
        old = self.inputs.get("old_per_token_logps")
        old = per_token_logps.detach() if old is None else old
        if self.linear:
            self.log_ratio = bounded_log_ratio(per_token_logps - old)
            shift = self._unit_shift(per_token_logps - old).detach()
        else:
            per_token_logps, old = per_token_logps.clamp(min=_LOWEST_LOGP), old.clamp(min=_LOWEST_LOGP)
            log_ratio = per_token_logps - old
            self.log_ratio = bounded_log_ratio(log_ratio)
            excess = torch.where(self.log_ratio == log_ratio, 0.0, self.log_ratio - log_ratio)
            shift = self._unit_shift(self.log_ratio) + excess
        self._shift_anchors(old, shift)
        if self.surrogate is not None:
            of_tokens, ratio = self.surrogate(self.log_ratio)
            self.inputs["advantages"] = of_tokens / ratio
        return per_token_logps + shift

    def _unit_shift(self, log_ratio: Tensor) -> Tensor:
        """(B, T) log(ratio of the unit) - `log_ratio`, 0 outside the turns and where token ratios stay."""
        if self.units is None:
            return torch.zeros_like(log_ratio)
        return torch.where(self.turns.loss_mask, self.units(self.log_ratio) - log_ratio, 0.0)

    def _shift_anchors(self, old: Tensor, shift: Tensor) -> None:
        """What the policy's log-probabilities are compared with besides the old ones moves along with them."""
        self.inputs["old_per_token_logps"] = old
        if "ref_per_token_logps" in self.inputs:
            self.inputs["ref_per_token_logps"] = self.inputs["ref_per_token_logps"] + shift
        if self.tracks_sampling:
            sampling = self.inputs.get("sampling_per_token_logps", old)
            self.inputs["sampling_per_token_logps"] = sampling + shift.detach()


@contextmanager
def open_clip_range(trainer: Any) -> Iterator[None]:
    """Within it, the loss of a `GRPOTrainer` clips nothing, token by token: its surrogate is clipped already."""
    before = trainer.epsilon_low, trainer.epsilon_high, trainer.args.delta, trainer.importance_sampling_level
    trainer.epsilon_low, trainer.epsilon_high, trainer.args.delta = 1.0, math.inf, None
    trainer.importance_sampling_level = "token"
    try:
        yield
    finally:
        trainer.epsilon_low, trainer.epsilon_high, trainer.args.delta, trainer.importance_sampling_level = before
