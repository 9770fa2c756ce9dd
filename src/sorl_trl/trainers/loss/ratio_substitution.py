"""The one seam through which turn ratios reach TRL's own loss.

`GRPOTrainer._compute_loss` forms `log_ratio = per_token_logps - old_per_token_logps` and reads the old, reference and
sampling log-probabilities from its inputs only after the forward pass. Returning substitute log-probabilities
`old + log(turn ratio)` from that forward pass, and shifting the reference and sampling ones by the same amount, makes
TRL's surrogate see the turn ratio while its reference KL, entropy, masks and corrections stay per token. Nothing of
TRL's 270 lines is copied; tests/contract pins the order of reads this rests on.

The same seam bounds the log-ratio (`bounded_log_ratio`), of which TRL takes the exponential as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sorl_trl.ops import bounded_log_ratio, log_importance_ratio

_LOWEST_LOGP = -1e4
"""Infinite log-probabilities are cut to this: a bounded difference cannot be put on top of infinity."""


class RatioSubstitution:
    """Substitutes turn ratios into one call of `GRPOTrainer._compute_loss`.

    Args:
        inputs: the batch; `self.inputs` is the shallow copy to call TRL with, the batch itself is never written to.
        turn_ids: (B, T) int64, -1 where a token is not trained on.
        turn_ratio: "geometric" or "arithmetic"; `None` leaves the token ratios as they are, but for the bound (TRL
            then forms its own sequence ratio, or uses them as they stand), and records them.
        linear: TRL's loss uses the log-probabilities linearly (CISPO, VESPO) and caps its weights itself: a ratio is
            substituted in value, each token keeps its own gradient, and nothing needs a bound.
        tracks_sampling: the off-policy mask is on, which compares with the sampling log-probabilities.
    """

    log_ratio: Tensor
    """(B, T) log-ratio of each token, bounded, with gradient; set by the forward pass."""

    def __init__(
        self,
        inputs: dict[str, Any],
        turn_ids: Tensor,
        turn_ratio: str | None,
        linear: bool = False,
        tracks_sampling: bool = False,
    ) -> None:
        self.inputs = dict(inputs)
        self.turn_ids = turn_ids
        self.turn_ratio = turn_ratio
        self.linear = linear
        self.tracks_sampling = tracks_sampling

    def __call__(self, per_token_logps: Tensor) -> Tensor:
        """What TRL's loss gets in place of `per_token_logps` (B, T)."""
        old = self.inputs.get("old_per_token_logps")
        old = per_token_logps.detach() if old is None else old
        if self.linear:
            self.log_ratio = bounded_log_ratio(per_token_logps - old)
            shift = self._turn_shift(per_token_logps - old).detach()
        else:
            per_token_logps, old = per_token_logps.clamp(min=_LOWEST_LOGP), old.clamp(min=_LOWEST_LOGP)
            log_ratio = per_token_logps - old
            self.log_ratio = bounded_log_ratio(log_ratio)
            excess = torch.where(self.log_ratio == log_ratio, 0.0, self.log_ratio - log_ratio)
            shift = self._turn_shift(self.log_ratio) + excess
        self._shift_anchors(old, shift)
        return per_token_logps + shift

    def _turn_shift(self, log_ratio: Tensor) -> Tensor:
        """(B, T) log(turn ratio) - `log_ratio`, 0 outside the turns and where token ratios stay."""
        if self.turn_ratio is None:
            return torch.zeros_like(log_ratio)
        turn_log_ratio = log_importance_ratio(self.log_ratio, self.turn_ids, "turn", self.turn_ratio)
        return torch.where(self.turn_ids >= 0, turn_log_ratio - log_ratio, 0.0)

    def _shift_anchors(self, old: Tensor, shift: Tensor) -> None:
        """What the policy's log-probabilities are compared with besides the old ones moves along with them."""
        self.inputs["old_per_token_logps"] = old
        if "ref_per_token_logps" in self.inputs:
            self.inputs["ref_per_token_logps"] = self.inputs["ref_per_token_logps"] + shift
        if self.tracks_sampling:
            sampling = self.inputs.get("sampling_per_token_logps", old)
            self.inputs["sampling_per_token_logps"] = sampling + shift.detach()
