"""The surrogates, the mean over turns and trajectories, and the critic's loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .masking import (
    TurnLayout,
    at_least_float32,
    in_precision_of,
    masked_mean,
    turn_broadcast,
    turn_layout,
    turn_reduce,
)

__all__ = [
    "aggregate_turns",
    "cispo_surrogate",
    "clipped_surrogate",
    "is_clipped",
    "is_value_clipped",
    "sapo_surrogate",
    "turn_weights",
    "value_loss",
    "vespo_surrogate",
    "vespo_weights",
]


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    epsilon_low: float | Tensor,
    epsilon_high: float | Tensor,
    delta: float | Tensor | None = None,
) -> Tensor:
    """Compute PPO's surrogate (arXiv 1707.06347, eq. 7), to be maximised: min(w Â, clip(w, 1 − ε_low, 1 + ε_high) Â).

    Args:
        ratio: (B, T), the importance ratio of the unit each token belongs to.
        advantages: (B, T), or any shape that broadcasts to it.
        epsilon_low, epsilon_high: How far below and above 1 the ratio may go: floats, or (B, T) with the values of
            each token's unit (`scaled_clip_range`).
        delta: Upper bound on the unclipped ratio, as in TRL (two-sided clipping, arXiv 2505.07291): min(w, δ)
            replaces w in the first term, which bounds the loss where Â < 0. A float, or (B, T).

    Elementwise, (B, T). The aggregation must leave out tokens that the model did not write.
    """
    ratio, advantages = at_least_float32(ratio), at_least_float32(advantages)
    bounded = ratio if delta is None else ratio.clamp(max=in_precision_of(ratio, delta))
    return torch.minimum(bounded * advantages, _into_range(ratio, epsilon_low, epsilon_high) * advantages)


def is_clipped(
    ratio: Tensor,
    advantages: Tensor,
    epsilon_low: float | Tensor,
    epsilon_high: float | Tensor,
    delta: float | Tensor | None = None,
) -> Tensor:
    """Find where `clipped_surrogate` stops the gradient: (Â > 0 and w > 1 + ε_high) or (Â < 0 and w < 1 − ε_low).

    With δ, it also stops where Â < 0 and w > max(δ, 1 + ε_high), and where Â > 0 and w > δ. Elementwise, (B, T):
    `ratio` is (B, T), and all other arguments broadcast to it.
    """
    ratio = at_least_float32(ratio)
    too_low = ratio < in_precision_of(ratio, 1 - epsilon_low)
    too_high = ratio > in_precision_of(ratio, 1 + epsilon_high)
    if delta is None:
        return ((advantages < 0) & too_low) | ((advantages > 0) & too_high)
    unbounded = ratio > in_precision_of(ratio, delta)
    negative = too_low | (too_high & unbounded)
    return ((advantages < 0) & negative) | ((advantages > 0) & (too_high | unbounded))


def cispo_surrogate(ratio: Tensor, advantages: Tensor, logps: Tensor, cap: float) -> Tensor:
    """Compute CISPO's objective of each token, to be maximised: sg[min(w_t, cap)] Â_t log π_θ (arXiv 2506.13585).

    A ratio above the cap weighs less, but no token loses its gradient. In TRL, `epsilon_high` is the cap.

    Args:
        ratio: (B, T), w_t, whose gradient is not used.
        advantages: (B, T), or any shape that broadcasts to it.
        logps: (B, T), log π_θ, with gradient.
        cap: The largest weight.

    Elementwise, (B, T).
    """
    return at_least_float32(ratio).detach().clamp(max=cap) * at_least_float32(advantages) * logps


def sapo_surrogate(ratio: Tensor, advantages: Tensor, temperature_pos: float, temperature_neg: float) -> Tensor:
    """Compute SAPO's objective of each token, to be maximised: (4/τ) σ(τ (w_t − 1)) Â_t (arXiv 2511.20347).

    A sigmoid replaces the clip; its slope at w = 1 is 1. τ is `temperature_pos` where Â > 0, else
    `temperature_neg`. Elementwise, (B, T): `advantages` broadcasts to `ratio`.
    """
    ratio, advantages = at_least_float32(ratio), at_least_float32(advantages)
    temperature = torch.where(advantages > 0, temperature_pos, temperature_neg).to(ratio.dtype)
    return torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages


def vespo_surrogate(weight: Tensor, advantages: Tensor, logps: Tensor) -> Tensor:
    """Compute VESPO's objective of each token, to be maximised: sg[φ(w)] Â log π_θ.

    Args:
        weight: (B, 1) or (B, T), φ of each trajectory's ratio (`vespo_weights`).
        advantages: (B, 1) or (B, T).
        logps: (B, T), log π_θ, with gradient.
    """
    return weight.detach() * at_least_float32(advantages) * logps


def vespo_weights(
    log_ratio: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    powers: tuple[float, float],
    decays: tuple[float, float],
    engine_ratio: Tensor | None = None,
) -> Tensor:
    """Compute VESPO's φ(w) = e^λ w^k e^{−λ w} of the sequence's ratio w, without gradient: of `advantages`' shape.

    Source: TRL's `get_gamma_weights`, with its bounds: ln w is cut to [ln 1e-8, 20].

    Args:
        log_ratio: (B, T), ℓ_t, bounded.
        loss_mask: (B, T), 1 on the tokens that count.
        advantages: (B, 1) or (B, T), whose sign chooses k and λ.
        powers: k where Â ≥ 0, and where Â < 0.
        decays: λ, likewise.
        engine_ratio: (B, T) or (B, 1), π_old/μ, by which w is multiplied; None for 1.
    """
    least = math.log(1e-8)
    log_w = torch.where(loss_mask.bool(), at_least_float32(log_ratio).detach(), 0.0).sum(1, keepdim=True)
    if engine_ratio is not None:
        mismatch = at_least_float32(engine_ratio).log().clamp(least, 20.0)
        counts = loss_mask.bool() if mismatch.size(1) > 1 else torch.ones_like(mismatch, dtype=torch.bool)
        log_w = log_w + torch.where(counts, mismatch, 0.0).sum(1, keepdim=True)
    log_w, is_good = log_w.clamp(least, 20.0), advantages >= 0
    k = torch.where(is_good, *powers)
    decay = torch.where(is_good, *decays).clamp(min=1e-4)
    return (decay + k * log_w - decay * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def aggregate_turns(x: Tensor, turn_ids: Tensor | TurnLayout) -> Tensor:
    """Average as the SO-PPO objective does, mean_i (1/n_i) Σ_k mean_{t∈k} x_t: (B, T) to ().

    It averages over the tokens of each turn, then over turns, then over trajectories. A trajectory without a turn
    counts as 0, as in TRL.
    """
    turns = turn_layout(turn_ids)
    per_trajectory = masked_mean(turn_reduce(x, turns, "mean"), turns.turn_mask, dim=1)
    return per_trajectory.sum() / max(len(per_trajectory), 1)


def turn_weights(turn_ids: Tensor | TurnLayout) -> Tensor:
    """Weight each token of turn k by |y_i| / (n_i |y^k|), and others by 0: (B, T) float32.

    With these weights, a mean over the tokens of each trajectory becomes a mean over its turns:
    (1/|y_i|) Σ_t weight_t x_t = (1/n_i) Σ_k mean_{t∈k} x_t. A loss that averages tokens per trajectory, such as TRL's
    `loss_type="grpo"`, thus computes `aggregate_turns`.
    """
    turns = turn_layout(turn_ids)
    tokens = turns.lengths.sum(dim=1, keepdim=True)
    return turn_broadcast(tokens / (turns.counts.unsqueeze(1) * turns.lengths).clamp(min=1), turns)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None) -> Tensor:
    """Compute PPO's clipped value loss, ½ max((v − R)², (clip(v, v_old − c, v_old + c) − R)²), elementwise.

    Args:
        values, old_values, returns: The critic's values now and at rollout time, and their targets, of one shape.
        clip_range: c, in units of the return; None gives ½ (v − R)².
    """
    error, clipped_error = _value_errors(values, old_values, returns, clip_range)
    return 0.5 * torch.maximum(error, clipped_error)


def is_value_clipped(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None) -> Tensor:
    """Find where clipping changes `value_loss`, that is, where the clipped error is larger: elementwise, bool.

    There the loss does not depend on v, so its gradient is 0. Arguments are those of `value_loss`; with `clip_range`
    None, the result is False everywhere.
    """
    error, clipped_error = _value_errors(values, old_values, returns, clip_range)
    return clipped_error > error


def _into_range(ratio: Tensor, epsilon_low: float | Tensor, epsilon_high: float | Tensor) -> Tensor:
    """clip(w, 1 − ε_low, 1 + ε_high), whose gradient is 1 from bound to bound and 0 outside."""
    low, high = in_precision_of(ratio, 1 - epsilon_low), in_precision_of(ratio, 1 + epsilon_high)
    return ratio.clamp(min=low).clamp(max=high)


def _value_errors(
    values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None
) -> tuple[Tensor, Tensor]:
    """(v − R)² and (clip(v, v_old − c, v_old + c) − R)², which are the same with `clip_range` None."""
    values, old_values, returns = at_least_float32(values), at_least_float32(old_values), at_least_float32(returns)
    clipped = values if clip_range is None else values.clamp(old_values - clip_range, old_values + clip_range)
    return (values - returns).square(), (clipped - returns).square()
