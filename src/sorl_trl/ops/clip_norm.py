"""Clipping-triggered normalization: the clipped share, the KL to the old policy, and the quantities they control."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from sorl_trl.checks import check_choice

from .importance import bounded_log_ratio, is_outside
from .masking import TurnLayout, at_least_float32, keep, masked_mean, turn_layout

__all__ = [
    "KL_ESTIMATORS",
    "clip_fraction",
    "clip_penalty",
    "clipping_bias",
    "gated_kl",
    "kl_at_rest",
    "kl_controlled_factor",
    "kl_to_old",
    "kl_to_reference",
    "length_adjusted_kl",
]

# Each maps ℓ = log π_θ − log π_old of samples of π_old to an estimate of KL(π_θ ‖ π_old). The unbiased one is
# w ln w − w + 1, arranged so that it keeps its precision near ℓ = 0.
_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": lambda log_ratio: (-log_ratio).expm1() + log_ratio,
    "unbiased": lambda log_ratio: log_ratio + (log_ratio - 1) * log_ratio.expm1(),
}
KL_ESTIMATORS = tuple(_ESTIMATORS)
_LR_STEP, _LR_LEAST = 1.5, 0.01
"""By how much an update changes the factor of the learning rate, and the smallest factor."""
_NEW_NOISE = 0.1
"""The weight of a new value in the running mean of the noise. Ours: trajectories differ much in theirs."""


def clip_fraction(
    log_ratio: Tensor, loss_mask: Tensor, epsilon_low: float | Tensor, epsilon_high: float | Tensor
) -> Tensor:
    """Compute f_i, the share of model tokens whose ratio is outside [1 − ε_low, 1 + ε_high], per trajectory: (B,).

    `log_ratio` and `loss_mask` are (B, T); the epsilons are floats or broadcast to (B, T). The result has no gradient
    and is 0 for a trajectory without a model token.
    """
    ratio = keep(log_ratio.detach(), loss_mask).exp()
    outside = is_outside(ratio, epsilon_low, epsilon_high)
    return masked_mean(outside.to(ratio.dtype), loss_mask, dim=1)


def kl_to_old(log_ratio: Tensor, loss_mask: Tensor, estimator: str) -> Tensor:
    """Estimate KL(π_θ ‖ π_old) per trajectory as KL_i = (1/|y_i|) Σ_t k(ℓ_t), in nats per token: (B,).

    Args:
        log_ratio: (B, T), ℓ_t = log π_θ − log π_old of tokens that π_old sampled; `bounded_log_ratio` is applied.
        loss_mask: (B, T), 1 on model tokens.
        estimator: k(ℓ). "k1": ℓ; "k2": ½ℓ²; "k3": exp(−ℓ) − 1 + ℓ; "unbiased": w ln w − w + 1 with w = exp ℓ, which is
            never negative, has the mean KL(π_θ ‖ π_old) under π_old, and the gradient w ℓ ∇log π. "k1" is a measure,
            not a penalty: under π_old, its mean gradient is that of −KL(π_old ‖ π_θ).

    Raises:
        ValueError: `estimator` is not one of the above.
    """
    check_choice("estimator", estimator, KL_ESTIMATORS)
    bounded = bounded_log_ratio(keep(log_ratio, loss_mask))
    return masked_mean(_ESTIMATORS[estimator](bounded), loss_mask, dim=1)


def kl_to_reference(logps: Tensor, reference_logps: Tensor, loss_mask: Tensor) -> Tensor:
    """Estimate KL(π_θ ‖ π_ref) of each token, (B, T), as GRPO does (eq. 4): exp(d) − d − 1, d = log π_ref − log π_θ.

    All arguments are (B, T). Like TRL, it bounds no difference. Off the model tokens, the result is 0.
    """
    return _ESTIMATORS["k3"](keep(logps - reference_logps, loss_mask))


def gated_kl(gate: Tensor, log_ratio: Tensor, loss_mask: Tensor, estimator: str = "unbiased") -> Tensor:
    """Multiply each trajectory's KL by a detached gate: gate_i · KL_i, (B,). Value and gradient are 0 at gate 0.

    Args:
        gate: (B,), at least 0. With `clip_fraction`, this is SORL's clipping-triggered penalty as specified
            (docs/internals/equations.md).
        log_ratio, loss_mask, estimator: As in `kl_to_old`, with its errors.
    """
    # Leave out rows with a closed gate before any arithmetic, because 0 times NaN is NaN.
    triggered = keep(log_ratio, loss_mask.bool() & (gate > 0).unsqueeze(1))
    return gate.detach() * kl_to_old(triggered, loss_mask, estimator)


def clip_penalty(
    log_ratio: Tensor, loss_mask: Tensor, epsilon_low: float | Tensor, epsilon_high: float | Tensor, estimator: str
) -> Tensor:
    """Compute SORL's clipping-triggered penalty as specified: f_i · KL_i, (B,), f_i detached.

    docs/internals/equations.md explains it. Arguments and errors are those of `clip_fraction` and `kl_to_old`. Value
    and gradient are exactly 0 for a trajectory in which nothing is clipped.
    """
    fraction = clip_fraction(log_ratio, loss_mask, epsilon_low, epsilon_high)
    return gated_kl(fraction, log_ratio, loss_mask, estimator)


def clipping_bias(ratio: Tensor, advantages: Tensor, stopped: Tensor, loss_mask: Tensor) -> Tensor:
    """Compute the scalar whose gradient is the clipping bias C(θ) of ST-PPO: mean_i (1/|y_i|) Σ_{t stopped} w_t Â_t.

    Args:
        ratio: (B, T), the importance ratio of each token's unit, with its gradient: ∇w = w ∇log π.
        advantages: (B, T), or any shape that broadcasts to it.
        stopped: (B, T) bool, where clipping removes a token's gradient: `is_clipped` for `clipped_surrogate`. It is
            ignored off the model tokens.
        loss_mask: (B, T), 1 on model tokens.

    A trajectory without a model token counts as 0, as in the loss. The result is exactly 0 if nothing is stopped.
    """
    lost = loss_mask.bool() & stopped
    per_trajectory = masked_mean(keep(ratio, lost) * keep(advantages, lost), loss_mask, dim=1)
    return per_trajectory.sum() / max(len(per_trajectory), 1)


def length_adjusted_kl(kl: Tensor, turn_ids: Tensor | TurnLayout) -> Tensor:
    """Multiply each trajectory's KL per token by the root of its turns' mean length: √(|y_i| / n_i) KL_i, (B,).

    Our addition: the geometric mean of a KL per token and a KL per turn. A bound on the KL per token allows turns of
    hundreds of tokens too much, because the KL of the whole turn grows with its length; a bound on that allows them
    too little (docs/evidence/results.md).

    Args:
        kl: (B,), `kl_to_old`, in nats per token.
        turn_ids: (B, T) int64, the turn of each model token, −1 elsewhere. Without a turn, the result is 0.
    """
    turns = turn_layout(turn_ids)
    kl = at_least_float32(kl)
    return (turns.loss_mask.sum(1).to(kl.dtype) / turns.counts.clamp(min=1)).sqrt() * kl


def kl_at_rest(mean: float, kl: float) -> float:
    """The running mean of the engine's noise, after an update that measured `kl` before the policy had moved.

    It is `mean` + (`kl` − `mean`) / 10, our choice, or `kl` if `mean` is NaN, because nothing was measured before. It
    is `mean` if `kl` is NaN, because the policy had moved, or no token is trained on. Both are `length_adjusted_kl`.
    """
    if math.isnan(mean) or math.isnan(kl):
        return mean if math.isnan(kl) else kl
    return mean + _NEW_NOISE * (kl - mean)


def kl_controlled_factor(factor: float, kl: float, target_kl: float) -> float:
    """The next factor of the scheduled learning rate, after an update that measured `kl` with `factor`.

    It is `factor` / 1.5 if `kl` > 2 `target_kl`, `factor` · 1.5 if `kl` < `target_kl` / 2, and otherwise `factor`
    (Rudin et al., arXiv 2109.11978, as in rsl_rl). Unlike rsl_rl, which keeps the learning rate itself in
    [1e-5, 1e-2], it keeps the factor in [0.01, 1].

    Args:
        factor: In [0.01, 1].
        kl: The mean `length_adjusted_kl` of the update's trajectories, less the engine's noise. NaN changes nothing:
            no token is trained on.
        target_kl: Above 0, in the same unit.
    """
    if kl > 2 * target_kl:
        return max(factor / _LR_STEP, _LR_LEAST)
    if kl < target_kl / 2:
        return min(factor * _LR_STEP, 1.0)
    return factor
