"""Ratios between policies: the importance ratio of a token, a turn or a sequence, its clip range, and the engine's.

We narrow a ratio's range with the number of tokens that it averages over; SORL does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sorl_trl.checks import check_choice

from .masking import (
    TurnLayout,
    at_least_float32,
    in_precision_of,
    keep,
    masked_mean,
    turn_broadcast,
    turn_layout,
    turn_reduce,
    widest,
)

__all__ = [
    "IMPORTANCE_SAMPLING_LEVELS",
    "TURN_RATIOS",
    "bounded_log_ratio",
    "effective_sample_size",
    "engine_ratio",
    "importance_ratio",
    "is_outside",
    "log_importance_ratio",
    "range_of_turns",
    "scaled_bound",
    "scaled_clip_range",
    "weight_sums",
    "with_own_gradients",
    "within",
]

IMPORTANCE_SAMPLING_LEVELS = ("token", "turn", "sequence")
TURN_RATIOS = ("geometric", "arithmetic")
LOG_RATIO_BOUND = 20.0
"""The largest absolute log-ratio of a token; training clamps larger ones to it. e²⁰ is 4.9e8."""
ENGINE_RATIOS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""TRL's ways to bound the ratio of old policy to engine."""


def bounded_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp ℓ_t to [−20, 20], elementwise, in float32 or better, so that no ratio made from it overflows or vanishes.

    The bound is that of verl and of TRL's `loss_type="vespo"`; the papers do not specify one. Beyond it, the gradient
    is 0, because such a ratio shows that the token's probability has changed extremely, but gives no useful direction.
    Infinite log-ratios are clamped like any other; NaN stays NaN.
    """
    return at_least_float32(log_ratio).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def importance_ratio(
    log_ratio: Tensor, turn_ids: Tensor | TurnLayout, level: str, turn_ratio: str = "geometric"
) -> Tensor:
    """Compute the ratio of the unit that each token belongs to: (B, T), with 1 where `turn_ids` is −1.

    This is the exponential of `log_importance_ratio`, which describes the arguments, equations and errors.
    """
    return log_importance_ratio(log_ratio, turn_ids, level, turn_ratio).exp()


def log_importance_ratio(
    log_ratio: Tensor, turn_ids: Tensor | TurnLayout, level: str, turn_ratio: str = "geometric"
) -> Tensor:
    """Compute the log-ratio of the unit that each token belongs to: (B, T), in nats, with 0 where `turn_ids` is −1.

    Args:
        log_ratio: (B, T), ℓ_t = log π_θ − log π_old of each token.
        turn_ids: (B, T) int64, the turn of each model token, −1 elsewhere.
        level: "token", ℓ_t as in PPO and GRPO; "turn"; or "sequence", the mean of ℓ over the trajectory's model
            tokens as in GSPO (arXiv 2507.18071).
        turn_ratio: The ratio of a turn. "geometric": exp of the mean of ℓ over its tokens, which is GSPO's length
            normalization applied per turn. "arithmetic": the mean of its token ratios exp(ℓ), as specified for SORL
            (arXiv 2511.20718; docs/internals/equations.md).

    Every token of a unit receives the gradient of the unit's ratio.

    Raises:
        ValueError: `level` or `turn_ratio` is not one of the above.
    """
    check_choice("level", level, IMPORTANCE_SAMPLING_LEVELS)
    check_choice("turn_ratio", turn_ratio, TURN_RATIOS)
    turns = turn_layout(turn_ids)
    if level == "token":
        return keep(log_ratio, turns.loss_mask)
    if level == "sequence":
        return keep(masked_mean(log_ratio, turns.loss_mask, dim=1).unsqueeze(1), turns.loss_mask)
    turn_log_ratio = (
        turn_reduce(log_ratio, turns, "mean") if turn_ratio == "geometric" else _log_mean_exp(log_ratio, turns)
    )
    return turn_broadcast(turn_log_ratio, turns)


def with_own_gradients(
    unit_log_ratio: Tensor, log_ratio: Tensor, turn_ids: Tensor | TurnLayout, turn_ratio: str = "geometric"
) -> Tensor:
    """Give each token the value of its unit's log-ratio and its own gradient: sg[log w] + ℓ_t − sg[ℓ_t], (B, T).

    If advantages differ between the tokens of a unit, each then moves its own tokens, instead of their mean moving the
    whole unit. If they are equal, the gradient of the unit's mean is the same as with the unit's ratio. The ratio of
    an arithmetic mean has the gradient w_t ∇ℓ_t, for which ℓ_t − sg[ℓ_t] is multiplied by sg[w_t / w].

    Source: GSPO-token (arXiv 2507.18071), where the unit is a sequence; we apply it to turns. sg stops the gradient.

    Args:
        unit_log_ratio: (B, T), the log-ratio of the unit that each token belongs to, from `log_importance_ratio`.
        log_ratio: (B, T), ℓ of each token.
        turn_ids: (B, T) int64, the turn of each model token, −1 elsewhere, where the result is 0.
        turn_ratio: How the unit's ratio was averaged, as in `log_importance_ratio`; that of a sequence is "geometric".

    Raises:
        ValueError: `turn_ratio` is neither.
    """
    check_choice("turn_ratio", turn_ratio, TURN_RATIOS)
    mask = turn_layout(turn_ids).loss_mask
    unit, log_ratio = keep(unit_log_ratio.detach(), mask), keep(log_ratio, mask)
    own = log_ratio - log_ratio.detach()
    return unit + (own if turn_ratio == "geometric" else own * (log_ratio.detach() - unit).exp())


def scaled_clip_range(epsilon: float | Tensor, turn_ids: Tensor | TurnLayout) -> Tensor:
    """Divide ε by the turn's tokens to the power 3/4, ε_k = ε |y^k|^(−3/4): (B, T), with ε where `turn_ids` is −1.

    Our addition. If log-ratios of tokens have a variance of 2 KL, their mean over n tokens has a standard deviation of
    √(2 KL / n). A target κ allows a KL of κ/√n per token (`length_adjusted_kl`), hence a standard deviation of
    √(2κ) n^(−3/4): ε is the same number of them at every n. With κ = .01, .28 is two.

    Args:
        epsilon: ε, how far the ratio of a turn of one token may move. A float, or a tensor that broadcasts to (B, T).
        turn_ids: (B, T) int64, the turn of each model token, −1 elsewhere.

    The result is float64, so that 1 ± ε_k is rounded only once, in the comparison with a ratio (float32 on MPS, which
    has no float64).
    """
    turns = turn_layout(turn_ids)
    lengths = torch.where(turns.loss_mask, turn_broadcast(turns.lengths, turns), 1)
    return epsilon * lengths.to(widest(lengths.device)) ** -0.75


def scaled_bound(delta: float | Tensor, turn_ids: Tensor | TurnLayout) -> Tensor:
    """Scale the distance of δ from 1 like the range, 1 + (δ − 1) |y^k|^(−3/4): (B, T), with δ where `turn_ids` is −1.

    Our addition. A bound of 4 on the mean of a hundred token ratios would never act. Arguments are those of
    `scaled_clip_range`.
    """
    return 1 + scaled_clip_range(delta - 1, turn_ids)


def is_outside(ratio: Tensor, epsilon_low: float | Tensor, epsilon_high: float | Tensor) -> Tensor:
    """Find the ratios below 1 − ε_low or above 1 + ε_high: elementwise, bool, and False for NaN.

    `epsilon_low` and `epsilon_high` are floats or broadcast to `ratio`.
    """
    ratio = at_least_float32(ratio)
    return (ratio < in_precision_of(ratio, 1 - epsilon_low)) | (ratio > in_precision_of(ratio, 1 + epsilon_high))


def weight_sums(ratio: Tensor, mask: Tensor) -> Tensor:
    """Sum what `effective_sample_size` needs where `mask` is 1: Σρ, Σρ² and N, (3,).

    These sums add up over micro-batches and processes, which effective sample sizes do not. `ratio` and `mask` are
    (B, T).
    """
    ratio = keep(ratio, mask)
    return torch.stack([ratio.sum(), ratio.square().sum(), mask.bool().sum().to(ratio.dtype)])


def effective_sample_size(sums: Tensor) -> Tensor:
    """Compute the effective sample size of N tokens weighted by their ratios, as a share of N: (Σρ)² / (N Σρ²), (...).

    Source: Kish. `sums` (..., 3) are those of `weight_sums`. The result is 1 if all ratios are equal, and NaN without
    a token.
    """
    total, squares, count = sums.unbind(-1)
    return total.square() / (count * squares)


def range_of_turns(epsilon: float | Tensor, turns: TurnLayout) -> float | Tensor:
    """Reduce ε per token, which broadcasts to (B, T), to ε per turn, (B, K). A float stays a float."""
    if not isinstance(epsilon, Tensor):
        return epsilon
    return turn_reduce(epsilon.expand(turns.turn_ids.shape), turns)


def within(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """Find where low <= ratio <= high: elementwise, bool. None sets no bound."""
    inside = torch.ones_like(ratio, dtype=torch.bool)
    inside = inside if low is None else inside & (ratio >= low)
    return inside if high is None else inside & (ratio <= high)


def engine_ratio(
    log_ratio: Tensor, loss_mask: Tensor, mode: str, least: float | None = None, most: float | None = None
) -> Tensor:
    """Compute π_old/μ of tokens, (B, T), or of sequences, (B, 1), within bounds: the weights of TRL's correction.

    Source: TRL's `vllm_importance_sampling_mode`. A token whose d_t is unknown (NaN) has the ratio 1.

    Args:
        log_ratio: (B, T), d_t = log π_old − log μ.
        loss_mask: (B, T), 1 on the tokens that count.
        mode: "token_truncate" and "sequence_truncate" cut the ratio to [`least`, `most`]; "token_mask" and
            "sequence_mask" set one outside to 0.

    Raises:
        ValueError: `mode` is none of these.
    """
    check_choice("vllm_importance_sampling_mode", mode, ENGINE_RATIOS)
    known = torch.where(loss_mask.bool(), log_ratio, 0.0).nan_to_num(nan=0.0)
    ratio = (known.sum(1, keepdim=True) if mode.startswith("sequence") else known).exp()
    if mode.endswith("truncate"):
        return ratio if least is None and most is None else ratio.clamp(least, most)
    return ratio.masked_fill(~within(ratio, least, most), 0.0)


def _log_mean_exp(log_ratio: Tensor, turns: TurnLayout) -> Tensor:
    """log((1/|y^k|) Σ_{t∈k} exp ℓ_t) of each turn: (B, K), with 0 for turns a trajectory does not have."""
    log_ratio = keep(log_ratio, turns.loss_mask)
    # Subtracting each turn's peak before exp, and adding it after log, avoids overflow and underflow.
    peak = _turn_max(log_ratio.detach(), turns)
    mean_exp = turn_reduce((log_ratio - turn_broadcast(peak, turns)).exp(), turns, "mean")
    # An absent turn's log 0 has the gradient NaN, which reaches no token but would trip anomaly detection.
    return peak + torch.where(turns.turn_mask, mean_exp, 1.0).log()


def _turn_max(x: Tensor, turns: TurnLayout) -> Tensor:
    """The largest `x` of each turn: (B, K), with 0 where that is infinite or the turn is absent."""
    table = x.new_full((len(x), turns.num_turns + 1), -torch.inf)
    peak = table.scatter_reduce(1, turns.slots, x, "amax")[:, : turns.num_turns]
    return torch.where(peak.isfinite(), peak, 0.0)
