"""The importance ratio between the policy and the old policy, of a token, a turn or a sequence, and its clip range.

That the range of a ratio that averages over many tokens may be narrower, the more there are, is ours, no part of SORL.
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

IMPORTANCE_SAMPLING_LEVELS = ("token", "turn", "sequence")
TURN_RATIOS = ("geometric", "arithmetic")
LOG_RATIO_BOUND = 20.0
"""How far a token's log-ratio may go, either way, before training takes it for this: e²⁰ is 4.9e8."""
_EXPONENTS = {"none": 0.0, "sqrt_length": 0.5, "length": 1.0}
CLIP_RANGE_SCALINGS = tuple(_EXPONENTS)
"""By which power of its tokens a unit's range is divided: 0, 1/2 or 1."""
LONGEST = 500
"""Tokens of a unit beyond which "length" narrows its range no further: 0.2/500 is 4e-4, what GSPO's authors clip at in
responses of thousands of tokens. What 0.2/n does beyond 350 tokens has not been measured."""


def bounded_log_ratio(log_ratio: Tensor) -> Tensor:
    """Cut ℓ_t to [−20, 20], elementwise, in float32 or better, so that no ratio formed from it overflows or vanishes.

    The bound is verl's, and that of TRL's `loss_type="vespo"`; method and papers leave it open. Beyond it the gradient
    is 0: such a ratio says that the token's probability has changed beyond measure, and nothing about how to mend it.
    Infinite log-ratios are cut like any other; NaN stays NaN.
    """
    return at_least_float32(log_ratio).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def importance_ratio(
    log_ratio: Tensor, turn_ids: Tensor | TurnLayout, level: str, turn_ratio: str = "geometric"
) -> Tensor:
    """Compute the ratio of the unit that each token belongs to: (B, T), with 1 where `turn_ids` is −1.

    It is the exponential of `log_importance_ratio`, where the arguments, equations and errors are described.
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
        turn_ratio: what the ratio of a turn is. "geometric": exp of the mean of ℓ over its tokens, GSPO's length
            normalization applied per turn. "arithmetic": the mean of its token ratios exp(ℓ), as SORL
            (arXiv 2511.20718) is specified in the note.

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
    of_turns = turn_reduce(log_ratio, turns, "mean") if turn_ratio == "geometric" else _log_mean_exp(log_ratio, turns)
    return turn_broadcast(of_turns, turns)


def with_own_gradients(unit_log_ratio: Tensor, log_ratio: Tensor, turn_ids: Tensor | TurnLayout) -> Tensor:
    """Give each token's share in a unit's log-ratio the token's own gradient: sg[log w] + ℓ_t − sg[ℓ_t], (B, T).

    The value stays that of the unit. With it, an advantage that differs between the tokens of a unit moves the tokens
    that it belongs to, and not the unit as a whole by its mean.

    Source: GSPO-token (arXiv 2507.18071), there of a sequence. sg stands for no gradient.

    Args:
        unit_log_ratio: (B, T), the log-ratio of the unit that each token belongs to, as of `log_importance_ratio`.
        log_ratio: (B, T), ℓ of each token.
        turn_ids: (B, T) int64, the turn of each model token, −1 elsewhere, where the result is 0.
    """
    own = log_ratio - log_ratio.detach()
    return keep(unit_log_ratio.detach() + own, turn_layout(turn_ids).loss_mask)


def unit_lengths(turn_ids: Tensor | TurnLayout, level: str) -> Tensor:
    """Count the model tokens of the unit that each token belongs to: (B, T) int64, with 1 where `turn_ids` is −1.

    At `level` "token" it is 1, at "turn" |y^k|, and at "sequence" |y_i|, over all turns.
    """
    check_choice("level", level, IMPORTANCE_SAMPLING_LEVELS)
    turns = turn_layout(turn_ids)
    if level == "token":
        return torch.ones_like(turns.turn_ids)
    of_sequence = turns.loss_mask.sum(dim=1, keepdim=True)
    lengths = turn_broadcast(turns.lengths, turns).long() if level == "turn" else of_sequence
    return torch.where(turns.loss_mask, lengths, 1)


def scaled_clip_range(epsilon: float | Tensor, turn_ids: Tensor | TurnLayout, level: str, scaling: str) -> Tensor:
    """Divide ε by a power of the unit's tokens, ε_k = ε / |y^k|^p: (B, T), with ε itself where `turn_ids` is −1.

    With p = 1, a unit of more than `LONGEST` tokens has the range of one of `LONGEST`.

    Source: ours. A mean over n tokens moves by 1/n as far as one of its tokens that moves alone, and by 1/√n as far
    where all move at random; ε keeps one meaning, that of a token's ratio, at every n.

    Args:
        epsilon: ε, how far the ratio of a unit of one token may go, whose range it is exactly. A float, or what
            broadcasts to (B, T).
        turn_ids: (B, T) int64, the turn of each model token, −1 elsewhere.
        level: "token", "turn" or "sequence", the unit.
        scaling: p. "none": 0; "sqrt_length": 1/2; "length": 1.

    The result is float64, so that 1 ± ε_k rounds once, when it is compared with a ratio (float32 on MPS, which has no
    float64).

    Raises:
        ValueError: `level` or `scaling` is not one of the above.
    """
    check_choice("scaling", scaling, CLIP_RANGE_SCALINGS)
    lengths = unit_lengths(turn_ids, level)
    if scaling == "length":
        lengths = lengths.clamp(max=LONGEST)
    return epsilon / lengths.to(widest(lengths.device)) ** _EXPONENTS[scaling]


def scaled_bound(delta: float | Tensor, turn_ids: Tensor | TurnLayout, level: str, scaling: str) -> Tensor:
    """Scale the distance of δ from 1 as the range is, 1 + (δ − 1) / |y^k|^p: (B, T), with δ where `turn_ids` is −1.

    Source: ours. A bound of 4 on the mean of a hundred token ratios would bound nothing. Arguments and errors are as
    with `scaled_clip_range`.
    """
    return 1 + scaled_clip_range(delta - 1, turn_ids, level, scaling)


def is_outside(ratio: Tensor, epsilon_low: float | Tensor, epsilon_high: float | Tensor) -> Tensor:
    """Find the ratios below 1 − ε_low or above 1 + ε_high: elementwise, bool, and False where one is NaN.

    `epsilon_low` and `epsilon_high` are floats or broadcast to `ratio`.
    """
    ratio = at_least_float32(ratio)
    return (ratio < in_precision_of(ratio, 1 - epsilon_low)) | (ratio > in_precision_of(ratio, 1 + epsilon_high))


def effective_sample_size(ratio: Tensor, mask: Tensor) -> Tensor:
    """Say which share of N tokens still counts where they are weighted by their ratios: () (Σρ)² / (N Σρ²) (Kish).

    `ratio` and `mask` are (B, T). 1 where all ratios are equal, NaN without a token.
    """
    ratio = at_least_float32(ratio)
    return masked_mean(ratio, mask).square() / masked_mean(ratio.square(), mask)


def range_of_turns(epsilon: float | Tensor, turns: TurnLayout) -> float | Tensor:
    """Take one ε per turn, (B, K), from one per token, (B, T) or what broadcasts to it; a float stays one."""
    if not isinstance(epsilon, Tensor):
        return epsilon
    return turn_reduce(epsilon.expand(turns.turn_ids.shape), turns)


def _log_mean_exp(log_ratio: Tensor, turns: TurnLayout) -> Tensor:
    """log((1/|y^k|) Σ_{t∈k} exp ℓ_t) of each turn: (B, K), with 0 for turns a trajectory does not have."""
    log_ratio = keep(log_ratio, turns.loss_mask)
    # Taking a constant of the turn out of the exponential changes nothing but this: no overflow, no underflow.
    peak = _turn_max(log_ratio.detach(), turns)
    mean_exp = turn_reduce((log_ratio - turn_broadcast(peak, turns)).exp(), turns, "mean")
    # The gradient of an absent turn's log 0 is NaN: it reaches no token, but would trip anomaly detection.
    return peak + torch.where(turns.turn_mask, mean_exp, 1.0).log()


def _turn_max(x: Tensor, turns: TurnLayout) -> Tensor:
    """The largest `x` of each turn: (B, K), with 0 where that is infinite or the turn is absent."""
    table = x.new_full((len(x), turns.num_turns + 1), -torch.inf)
    peak = table.scatter_reduce(1, turns.slots, x, "amax")[:, : turns.num_turns]
    return torch.where(peak.isfinite(), peak, 0.0)
