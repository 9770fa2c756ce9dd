"""LLDS in training: a term of the loss where the likelihood of good trajectories falls (docs/paper_to_code.md)."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from sorl_trl.ops import good_trajectories, likelihood_falls
from sorl_trl.trainers.loss.metric_log import MetricLog
from sorl_trl.trainers.loss.micro_batch import MicroBatch, advantages_of

_TOKENS = "llds_tokens"
"""Field of a batch: model tokens of the good trajectories of the whole generation batch, over all ranks."""


def count_good_tokens(output: dict[str, Any], accelerator: Accelerator) -> None:
    """Put N into the batch that has been made of a rollout. All ranks call it together, when advantages are final."""
    mask = output["turn_ids"] >= 0
    good = good_trajectories(advantages_of(output), mask)
    output[_TOKENS] = accelerator.gather((mask & good.unsqueeze(1)).sum()).sum()


def llds(batch: MicroBatch, parts: int, metric_log: MetricLog) -> Tensor:
    """The falls of a micro-batch, scaled so that the mean over micro-batches and ranks is Σ_i Σ_k F_{i,k} / N.

    Before the first update on a rollout, and in evaluation, the policy is the one that sampled it: what two forward
    passes differ by there is rounding, whose gradient would be as large as any other, and the term is 0.

    Args:
        batch: of one rank.
        parts: in how many micro-batches of all ranks a generation batch is split.
        metric_log: where the value and the share of turns whose gate is open are logged.
    """
    turns = batch.turns
    # A batch may be of before a checkpoint, when LLDS was off.
    has_moved = batch.is_training and batch.age != 0 and _TOKENS in batch.inputs
    log_ratio = batch.log_ratio if has_moved else torch.zeros_like(batch.log_ratio)
    good = good_trajectories(batch.advantages, turns.loss_mask)
    falls, has_fallen = likelihood_falls(log_ratio, turns, good)
    value = falls.sum() * parts / batch.inputs[_TOKENS].clamp(min=1) if has_moved else falls.sum()
    metric_log.add_rank_mean("llds/loss", value)
    metric_log.add_mean("llds/open_turns", has_fallen.float(), turns.turn_mask & good.unsqueeze(1))
    return value
