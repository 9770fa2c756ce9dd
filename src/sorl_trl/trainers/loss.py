"""The policy's loss, for every method, in the order of its steps.

    ratio      w_t = exp(log-ratio of the token, its turn or the sequence)         `MicroBatch.ratio`
    surrogate  S_t = min(w_t Â_t, clip(w_t, 1 − ε_low, 1 + ε_high) Â_t)            `methods/losses.py`
    mean       J = mean_i (1/n_i) Σ_k mean_{t∈k} S_t                               `methods/losses.py`
    terms      L = −J + λ mean_i f_i KL_i                                          `methods.ClipPenalty`, or others

With the pieces of TRL's loss types and levels, loss, metrics and gradients equal TRL's;
tests/contract/test_trl_parity.py compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from sorl_trl.methods import MicroBatch, Objective, token_mean
from sorl_trl.ops import bounded_log_ratio, kl_to_reference
from sorl_trl.trainers.batch import (
    GENERATED_AT,
    loss_mask_of,
    row_scale,
    turns_of,
)
from sorl_trl.trainers.forward import Pass
from sorl_trl.trainers.host import LossSettings

_LOWEST_LOGP = -1e4
"""Infinite log-probabilities are clamped to this, because the difference of two of them would be NaN."""
Metrics: TypeAlias = dict[str, Any]


def policy_loss(settings: LossSettings, batch: MicroBatch, scores: Pass) -> tuple[Tensor, Objective, Metrics]:
    """The loss of a micro-batch without its terms, the surrogate's objective, and metrics.

    `scores` is the policy's pass over the micro-batch, with entropies and, for a mixture of experts, its router loss.
    """
    inputs, mean = batch.inputs, settings.method.mean
    mask, total = loss_mask_of(inputs), inputs["num_items_in_batch"]
    entropies = scores.entropies
    assert entropies is not None

    # Surrogate
    objective = settings.method.surrogate(batch)
    losses, metrics = -objective.value, dict(objective.metrics)

    # Masks and engine weights
    if settings.off_policy_mask is not None:
        losses = losses * settings.off_policy_mask(
            advantages=batch.advantages,
            per_token_logps=batch.logps,
            sampling_per_token_logps=batch.sampling_logps,
            mask=mask,
        )
    entropy_mask = None
    if settings.entropy_mask is not None:
        entropy_mask = settings.entropy_mask(entropies, mask)
        losses = losses * entropy_mask
    if settings.weighs_engine and not objective.is_weighted:
        losses = losses * inputs["importance_sampling_ratio"]
    policy = mean(losses, mask, total, batch)

    # Reference KL
    metrics["entropy"] = (entropies, mask)
    if settings.reference_beta != 0.0:
        kl = kl_to_reference(batch.logps, inputs["ref_per_token_logps"], mask)
        if settings.corrects_kl:
            kl = kl * batch.ratio
        policy = policy + settings.reference_beta * mean(kl, mask, total, batch)
        metrics["kl"] = (kl, mask)

    # Entropy bonus, router loss
    loss = policy / settings.micro_batches
    if settings.entropy_bonus is not None:
        metrics["policy_loss"] = loss if mean is token_mean else policy  # as TRL
        bonus = settings.entropy_bonus(entropies, mask if entropy_mask is None else mask * entropy_mask)
        loss = loss - bonus / settings.micro_batches
    if settings.router_coef is not None:
        assert scores.aux_loss is not None
        loss = loss + settings.router_coef * scores.aux_loss / settings.micro_batches
        metrics["aux_loss"] = scores.aux_loss
    return loss, objective, metrics


def micro_batch(settings: LossSettings, logps: Tensor, inputs: Mapping[str, Any]) -> MicroBatch:
    """The input of the method's pieces, the metrics and the observers; `logps` (B, T) have a gradient."""
    step, is_training = settings.step, settings.is_training
    logps = logps.clamp(min=_LOWEST_LOGP)
    old = inputs.get("old_per_token_logps")
    old = logps.detach() if old is None else old.clamp(min=_LOWEST_LOGP)
    generated = int(inputs.get(GENERATED_AT, step))
    return MicroBatch(
        logps=logps,
        old_logps=old,
        sampling_logps=inputs.get("sampling_per_token_logps", old),
        log_ratio=bounded_log_ratio(logps - old),
        turns=turns_of(inputs),
        advantages=inputs["advantages"] if inputs["advantages"].dim() == 2 else inputs["advantages"].unsqueeze(1),
        unit=settings.method.ratio,
        clip=settings.method.clip,
        longest=settings.max_completion_length,
        row_scale=row_scale(inputs),
        share=settings.share,
        is_training=is_training,
        step=step + 1,
        age=step - generated if is_training else None,
        ends_step=settings.ends_step,
        inputs=inputs,
    )
