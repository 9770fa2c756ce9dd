"""The loss of SO-GRPO, which is also the policy's loss in SO-PPO, from top to bottom.

    ratio      w_t = exp(log-ratio of the token, its turn or the sequence)         `MicroBatch.ratio`
    surrogate  S_t = min(w_t Â_t, clip(w_t, 1 − ε_low, 1 + ε_high) Â_t)            `methods.PPOMin`, or another piece
    mean       J = mean_i (1/n_i) Σ_k mean_{t∈k} S_t, with `loss_type="turn"`      `_mean`
    terms      L = −J + λ mean_i f_i KL_i, by default                              `methods.ClipPenalty`, or others

Reference KL, entropy and masks are TRL's. If TRL's own loss is requested (`is_trls`), TRL computes it; terms are added
and metrics logged in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sorl_trl.methods import ClipRange, MicroBatch, Objective, PPOMin
from sorl_trl.ops import TurnLayout, bounded_log_ratio, scaled_bound, scaled_clip_range, turn_weights
from sorl_trl.trainers.config import TRLS_LOSS_TYPES
from sorl_trl.trainers.turns.batch import (
    GENERATED_AT,
    GOOD_TOKENS,
    OLD_SINCE,
    advantages_of,
    ask_policy,
    loss_mask_of,
    row_scale,
    turns_of,
)
from sorl_trl.trainers.turns.recording import corrects_sampling, trl_corrects_sampling

_LOWEST_LOGP = -1e4
"""Infinite log-probabilities are clamped to this, because the difference of two of them would be NaN."""


def is_trls(trainer: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether the requested loss is TRL's own, so that TRL computes it."""
    args = trainer.args
    if args.loss_type in TRLS_LOSS_TYPES:
        return True
    has_trls_ratio = args.importance_sampling_level == "token" or (
        args.importance_sampling_level == "sequence" and inputs["advantages"].dim() == 1
    )
    has_trls_mean = args.loss_type != "turn" and row_scale(inputs) == 1.0
    has_trls_weights = corrects_sampling(trainer) == trl_corrects_sampling(trainer)
    has_trls_clip = type(trainer.method.surrogate) is PPOMin and args.clip_range_scaling == "none"
    has_trls_terms = has_trls_weights and trainer._reference_beta == trainer.beta
    return has_trls_ratio and has_trls_mean and has_trls_clip and has_trls_terms


def policy_loss(
    trainer: Any, model: Any, inputs: Mapping[str, Any]
) -> tuple[Tensor, MicroBatch, Objective, dict[str, Any]]:
    """The loss of a micro-batch without its terms, the pieces' input, the surrogate's objective, and metrics."""
    mask = loss_mask_of(inputs)

    # (B, T) log-probabilities and entropies of the completions, and a mixture's router loss
    found = ask_policy(trainer, model, inputs, entropies=True, router=trainer.aux_loss_enabled)
    logps, entropies, aux_loss = found.logps, found.entropies, found.aux_loss

    # Ratio and surrogate
    batch = micro_batch(trainer, logps, inputs)
    objective = trainer.method.surrogate(batch)
    losses = -objective.value
    if trainer.args.loss_type == "turn":
        losses = turn_weights(batch.turns) * losses

    # Masks and engine weights
    if trainer.off_policy_mask_threshold is not None:
        losses = losses * trainer.get_off_policy_mask(
            advantages=batch.advantages,
            per_token_logps=batch.logps,
            sampling_per_token_logps=inputs.get("sampling_per_token_logps", batch.old_logps),
            mask=mask,
            off_policy_threshold=trainer.off_policy_mask_threshold,
        )
    entropy_mask = None
    if trainer.top_entropy_quantile < 1.0:
        entropy_mask = trainer.get_high_entropy_mask(entropies, mask, 1 - trainer.top_entropy_quantile)
        losses = losses * entropy_mask
    if corrects_sampling(trainer):
        losses = losses * inputs["importance_sampling_ratio"]

    # Reference KL, k3: exp(ref − logp) − (ref − logp) − 1
    metrics: dict[str, Any] = {"entropy": (entropies, mask)}
    if trainer._reference_beta != 0.0:
        difference = torch.where(mask.bool(), inputs["ref_per_token_logps"] - batch.logps, 0.0)
        kl = difference.exp() - difference - 1
        if trainer.args.use_bias_correction_kl:
            kl = kl * batch.ratio
        losses = losses + trainer._reference_beta * kl
        metrics["kl"] = (kl, mask)

    # Mean, entropy bonus, router loss
    mean = _mean(trainer, losses, mask, batch)
    loss = mean / trainer._micro_batches()
    if trainer._entropy_bonus_enabled:
        metrics["policy_loss"] = loss if trainer.args.loss_type == "dapo" else mean  # as TRL
        loss = loss - _entropy_bonus(trainer, entropies, mask if entropy_mask is None else mask * entropy_mask)
    if trainer.aux_loss_enabled:
        loss = loss + trainer.router_aux_loss_coef * aux_loss / trainer._micro_batches()
        metrics["aux_loss"] = aux_loss
    return loss, batch, objective, metrics


def _mean(trainer: Any, losses: Tensor, mask: Tensor, batch: MicroBatch) -> Tensor:
    """The mean of (B, T) losses, before it is divided by the micro-batches of the optimizer step.

    "turn" and "grpo" average the tokens of each trajectory, then trajectories; for "turn", tokens are weighted by
    `turn_weights`, which makes this the mean over turns. "dr_grpo" divides by `max_completion_length`, "dapo" by the
    tokens of the whole generation batch, and "bnpo" by those of the micro-batch.
    """
    kept = torch.where(mask.bool(), losses, 0.0)
    loss_type = trainer.args.loss_type
    if loss_type == "dr_grpo":
        return kept.sum() / (len(kept) * trainer.max_completion_length) * batch.row_scale
    if loss_type == "dapo":
        return kept.sum() / (batch.inputs["num_items_in_batch"].clamp(min=1) * batch.share)
    if loss_type == "bnpo":
        return kept.sum() / mask.sum().clamp(min=1)
    return (kept.sum(1) / mask.sum(1).clamp(min=1)).mean() * batch.row_scale


def _entropy_bonus(trainer: Any, entropies: Tensor, mask: Tensor) -> Tensor:
    """The entropy bonus of a micro-batch: the coefficient times the mean of (B, T) entropies, in nats, on `mask`.

    As in TRL, the coefficient is fixed or follows a target, with the values from the end of the previous step.
    """
    mean = (entropies * mask).sum() / mask.sum().clamp(min=1) / trainer._micro_batches()
    coef = trainer.entropy_coef
    if trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target:
        coef = 0.0
    if trainer.model.training:
        if trainer.use_adaptive_entropy:
            _follow_target(trainer, torch.stack([(entropies * mask).sum(), mask.sum()]).detach())
        if trainer.accelerator.sync_gradients:
            trainer._metrics["train"]["entropy_coef"].append(trainer.entropy_coef)
    return coef * mean


def _follow_target(trainer: Any, sums: Tensor) -> None:
    """Count a micro-batch's entropy and tokens, and move the coefficient when the optimizer steps."""
    before = trainer._entropy_window_stats
    trainer._entropy_window_stats = sums if before is None else before + sums
    if not trainer.accelerator.sync_gradients:
        return
    total, count = trainer.accelerator.reduce(trainer._entropy_window_stats, reduction="sum")
    entropy, args = (total / count.clamp(min=1)).item(), trainer.args
    step = args.entropy_coef_delta if entropy <= args.entropy_target else -args.entropy_coef_delta
    trainer.entropy_coef = min(max(trainer.entropy_coef + step, args.entropy_coef_min), args.entropy_coef_max)
    trainer._last_world_entropy = entropy
    trainer._entropy_window_stats = None


def micro_batch(trainer: Any, logps: Tensor, inputs: Mapping[str, Any]) -> MicroBatch:
    """The input of the method's pieces, the metrics and the observers; `logps` (B, T) have a gradient."""
    args, is_training = trainer.args, trainer.model.training
    logps = logps.clamp(min=_LOWEST_LOGP)
    old = inputs.get("old_per_token_logps")
    old = logps.detach() if old is None else old.clamp(min=_LOWEST_LOGP)
    turns = turns_of(inputs)
    of_token = ClipRange(trainer.epsilon_low, trainer.epsilon_high, args.delta)
    generated = inputs.get(GENERATED_AT)
    step = trainer.state.global_step
    return MicroBatch(
        logps=logps,
        old_logps=old,
        sampling_logps=inputs.get("sampling_per_token_logps", old),
        log_ratio=bounded_log_ratio(logps - old),
        turns=turns,
        advantages=advantages_of(inputs),
        level=args.importance_sampling_level,
        turn_ratio=args.turn_ratio,
        token_range=of_token,
        turn_range=scaled(of_token, turns, "turn", args.clip_range_scaling),
        clip_range=scaled(of_token, turns, args.importance_sampling_level, args.clip_range_scaling),
        row_scale=row_scale(inputs),
        share=trainer._share_of_rollout(),
        good_tokens=inputs.get(GOOD_TOKENS),
        is_training=is_training,
        step=step + 1,
        age=None if generated is None or not is_training else step - int(generated),
        has_moved=is_training and step != int(inputs.get(OLD_SINCE, step)),
        ends_step=trainer.accelerator.sync_gradients or not is_training,
        inputs=inputs,
    )


def scaled(of_token: ClipRange, turns: TurnLayout, level: str, scaling: str) -> ClipRange:
    """Scale the clip range of a single token to the units of `level`, by `clip_range_scaling`."""
    if scaling == "none":
        return of_token
    low, high = (scaled_clip_range(epsilon, turns, level, scaling) for epsilon in of_token[:2])
    delta = of_token.delta
    return ClipRange(low, high, None if delta is None else scaled_bound(delta, turns, level, scaling))
