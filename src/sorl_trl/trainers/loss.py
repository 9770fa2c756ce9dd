"""The policy's loss, for every loss type at every level, in the order of its steps.

    ratio      w_t = exp(log-ratio of the token, its turn or the sequence)         `MicroBatch.ratio`
    surrogate  S_t = min(w_t Â_t, clip(w_t, 1 − ε_low, 1 + ε_high) Â_t)            `methods.PPOMin`, or another piece;
               CISPO, SAPO and VESPO have their own                                `SURROGATES`
    mean       J = mean_i (1/n_i) Σ_k mean_{t∈k} S_t, with `loss_type="turn"`      `mean_over_batch`
    terms      L = −J + λ mean_i f_i KL_i, by default                              `methods.ClipPenalty`, or others

With TRL's loss types and levels, loss, metrics and gradients equal TRL's; tests/contract/test_trl_parity.py compares
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sorl_trl.methods import ClipRange, MicroBatch, Objective
from sorl_trl.ops import (
    TurnLayout,
    bounded_log_ratio,
    cispo_surrogate,
    sapo_surrogate,
    scaled_bound,
    scaled_clip_range,
    turn_weights,
    vespo_surrogate,
)
from sorl_trl.trainers.batch import (
    GENERATED_AT,
    OLD_POLICY_STEP,
    advantages_of,
    loss_mask_of,
    row_scale,
    turns_of,
)
from sorl_trl.trainers.forward import Pass
from sorl_trl.trainers.host import LossSettings

_LOWEST_LOGP = -1e4
"""Infinite log-probabilities are clamped to this, because the difference of two of them would be NaN."""
OVER_ALL_TOKENS = ("dapo", "cispo", "vespo")
"""The loss types that divide by the tokens of the whole generation batch."""
Metrics: TypeAlias = dict[str, Any]


def policy_loss(settings: LossSettings, batch: MicroBatch, scores: Pass) -> tuple[Tensor, Objective, Metrics]:
    """The loss of a micro-batch without its terms, the surrogate's objective, and metrics.

    `scores` is the policy's pass over the micro-batch, with entropies and, for a mixture of experts, its router loss.
    """
    inputs, args = batch.inputs, settings.args
    mask = loss_mask_of(inputs)
    entropies = scores.entropies
    assert entropies is not None

    # Surrogate
    objective, metrics = surrogate(settings, batch)
    losses = -objective.value
    if args.loss_type == "turn":
        losses = turn_weights(batch.turns) * losses

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
    if settings.weighs_engine and args.loss_type != "vespo":  # VESPO's weight of the sequence contains them
        losses = losses * inputs["importance_sampling_ratio"]

    # Reference KL, k3: exp(ref − logp) − (ref − logp) − 1
    metrics["entropy"] = (entropies, mask)
    if settings.reference_beta != 0.0:
        difference = torch.where(mask.bool(), inputs["ref_per_token_logps"] - batch.logps, 0.0)
        kl = difference.exp() - difference - 1
        if args.use_bias_correction_kl:
            kl = kl * batch.ratio
        losses = losses + settings.reference_beta * kl
        metrics["kl"] = (kl, mask)

    # Mean, entropy bonus, router loss
    mean = mean_over_batch(settings, losses, mask, batch)
    loss = mean / settings.micro_batches
    if settings.entropy_bonus is not None:
        metrics["policy_loss"] = loss if args.loss_type in OVER_ALL_TOKENS else mean  # as TRL
        bonus = settings.entropy_bonus(entropies, mask if entropy_mask is None else mask * entropy_mask)
        loss = loss - bonus / settings.micro_batches
    if settings.router_coef is not None:
        assert scores.aux_loss is not None
        loss = loss + settings.router_coef * scores.aux_loss / settings.micro_batches
        metrics["aux_loss"] = scores.aux_loss
    return loss, objective, metrics


# -------------------------------------------------------------------------------------------------------------------
# Surrogates
# -------------------------------------------------------------------------------------------------------------------


def surrogate(settings: LossSettings, batch: MicroBatch) -> tuple[Objective, Metrics]:
    """The objective for each token, from the loss type or else the method, and the loss type's own metrics."""
    own = SURROGATES.get(settings.args.loss_type)
    if own is None:
        return settings.surrogate(batch), {}
    value, metrics = own(settings, batch)
    return Objective(value, torch.zeros_like(batch.loss_mask)), metrics  # none of them stops a gradient


def _cispo(settings: LossSettings, batch: MicroBatch) -> tuple[Tensor, Metrics]:
    ratio, cap = batch.ratio.detach(), float(settings.token_range.high)
    is_capped = ((ratio > cap) & (batch.advantages > 0)).float()
    value = cispo_surrogate(ratio, batch.advantages, batch.logps, cap)
    return value, {"cispo_clip_ratio": unit_values(is_capped, batch)}


def _sapo(settings: LossSettings, batch: MicroBatch) -> tuple[Tensor, Metrics]:
    args = settings.args
    return sapo_surrogate(batch.ratio, batch.advantages, args.sapo_temperature_pos, args.sapo_temperature_neg), {}


def _vespo(settings: LossSettings, batch: MicroBatch) -> tuple[Tensor, Metrics]:
    args = settings.args
    weight = settings.gamma_weights(
        advantages=batch.advantages,
        log_ratio_per_token=batch.log_ratio,
        mask=batch.loss_mask,
        importance_sampling_ratio=batch.inputs.get("importance_sampling_ratio"),
        k_pos=args.vespo_k_pos,
        lambda_pos=args.vespo_lambda_pos,
        k_neg=args.vespo_k_neg,
        lambda_neg=args.vespo_lambda_neg,
    )
    is_shared = weight.size(1) == 1
    shown = (weight, torch.ones_like(weight)) if is_shared else (weight, batch.loss_mask)
    return vespo_surrogate(weight, batch.advantages, batch.logps), {"vespo/phi_seq_mean": shown}


SURROGATES: Mapping[str, Callable[[LossSettings, MicroBatch], tuple[Tensor, Metrics]]] = {
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
}
"""The loss types that replace the method's surrogate with their own."""


# -------------------------------------------------------------------------------------------------------------------
# Means
# -------------------------------------------------------------------------------------------------------------------


def mean_over_batch(settings: LossSettings, losses: Tensor, mask: Tensor, batch: MicroBatch) -> Tensor:
    """The mean of (B, T) losses, before it is divided by the micro-batches of the optimizer step.

    "turn", "grpo" and "sapo" average the tokens of each trajectory, then trajectories; for "turn", tokens are weighted
    by `turn_weights`, which makes this the mean over turns. "luspo" sums the tokens of each trajectory instead.
    "dr_grpo" divides by `max_completion_length`; "dapo", "cispo" and "vespo" by the tokens of the whole generation
    batch; and "bnpo" by those of the micro-batch.
    """
    kept = torch.where(mask.bool(), losses, 0.0)
    loss_type = settings.args.loss_type
    if loss_type == "luspo":
        return kept.sum(1).mean() * batch.row_scale
    if loss_type == "dr_grpo":
        return kept.sum() / (len(kept) * settings.max_completion_length) * batch.row_scale
    if loss_type in OVER_ALL_TOKENS:
        return kept.sum() / (batch.inputs["num_items_in_batch"].clamp(min=1) * batch.share)
    if loss_type == "bnpo":
        return kept.sum() / mask.sum().clamp(min=1)
    return (kept.sum(1) / mask.sum(1).clamp(min=1)).mean() * batch.row_scale


def unit_values(values: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """(B, T) values per token and where to average them; one per sequence if its tokens share ratio and advantage."""
    if batch.level == "sequence" and batch.advantages.size(1) == 1:
        per_row = (values * batch.loss_mask).amax(1)
        return per_row, torch.ones_like(per_row)
    return values, batch.loss_mask


# -------------------------------------------------------------------------------------------------------------------
# The micro-batch
# -------------------------------------------------------------------------------------------------------------------


def micro_batch(settings: LossSettings, logps: Tensor, inputs: Mapping[str, Any]) -> MicroBatch:
    """The input of the method's pieces, the metrics and the observers; `logps` (B, T) have a gradient."""
    args, step, is_training = settings.args, settings.step, settings.is_training
    logps = logps.clamp(min=_LOWEST_LOGP)
    old = inputs.get("old_per_token_logps")
    old = logps.detach() if old is None else old.clamp(min=_LOWEST_LOGP)
    turns = turns_of(inputs)
    generated = inputs.get(GENERATED_AT)
    return MicroBatch(
        logps=logps,
        old_logps=old,
        sampling_logps=inputs.get("sampling_per_token_logps", old),
        log_ratio=bounded_log_ratio(logps - old),
        turns=turns,
        advantages=advantages_of(inputs),
        level=args.importance_sampling_level,
        turn_ratio=args.turn_ratio,
        token_range=settings.token_range,
        turn_range=range_by_length(settings.token_range, turns) if args.scale_clip_range else settings.token_range,
        row_scale=row_scale(inputs),
        share=settings.share,
        is_training=is_training,
        step=step + 1,
        age=None if generated is None or not is_training else step - int(generated),
        has_moved=is_training and step != int(inputs.get(OLD_POLICY_STEP, step)),
        ends_step=settings.ends_step,
        inputs=inputs,
    )


def range_by_length(token_range: ClipRange, turns: TurnLayout) -> ClipRange:
    """The clip range of each turn, from that of a turn of one token."""
    low, high = (scaled_clip_range(epsilon, turns) for epsilon in token_range[:2])
    return ClipRange(low, high, None if token_range.delta is None else scaled_bound(token_range.delta, turns))
