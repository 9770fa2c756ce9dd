"""Agents that share a policy: numbers for their names, which all processes agree on, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.functional import pad

from sorl_trl.methods import MicroBatch, ScoredRollout
from sorl_trl.ops import is_outside, kl_to_old
from sorl_trl.trainers.batch import AGENT_IDS, AGENT_NAMES, gather_rows
from sorl_trl.trainers.sampled import Sampled, padded


def agent_fields(sampled: Sequence[Sampled], turn_ids: Tensor) -> dict[str, Any]:
    """The fields of a batch that say whose turns they are; none if no turn of any process has a name.

    Names and numbers belong to one rollout, and a list has the names of each row, so that both stay together wherever
    a batch is shuffled, split or saved. All processes call it together.
    """
    own = {name for row in sampled for name in row.agents}
    names = tuple(sorted({*gather_object(sorted(own))}))
    if not any(names):
        return {}
    table = pad(_numbers(sampled, names).to(turn_ids.device), (0, 1), value=-1)  # the last column is of no turn
    slots = torch.where(turn_ids >= 0, turn_ids, table.size(1) - 1)
    return {AGENT_IDS: table.gather(1, slots), AGENT_NAMES: [names] * len(sampled)}


def agents_of_all(accelerator: Accelerator, sampled: Sequence[Sampled], names: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a `ScoredRollout` that say whose turns they are."""
    if not names:
        return {}
    numbers = _numbers(sampled, names).to(accelerator.device)
    return {"agents": gather_rows(accelerator, numbers, padding=-1), "agent_names": names}


def names_of(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the agents in a batch or micro-batch, in the order of their numbers; empty if there are none."""
    names: tuple[str, ...] = batch[AGENT_NAMES][0] if AGENT_NAMES in batch else ()
    return names


def log_agents(trainer: Any, scored: ScoredRollout) -> None:
    """Log which share of the turns is each agent's, and the mean reward of the trajectories in which it acts."""
    logged = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, own in _each_of_several(scored.agents, scored.agent_names):
        logged[f"agents/{name}/turn_share"].append((own.sum() / scored.turns.counts.sum()).item())
        logged[f"agents/{name}/reward"].append(scored.totals()[own.any(1)].nanmean().item())


@torch.no_grad()
def agent_metrics(batch: MicroBatch) -> dict[str, tuple[Tensor, Tensor]]:
    """By name, values of each agent's tokens or trajectories in a micro-batch, and where to average them."""
    ratio, log_ratio = batch.ratio, batch.log_ratio
    outside = is_outside(ratio, *batch.clip_range[:2]).float()
    metrics = {}
    for name, agents in _each_of_several(batch.inputs.get(AGENT_IDS), names_of(batch.inputs)):
        own = agents & batch.loss_mask
        metrics[f"agents/{name}/advantage_square"] = batch.advantages.square().expand_as(ratio), own
        metrics[f"agents/{name}/clip_fraction"] = outside, own
        metrics[f"agents/{name}/kl_to_old"] = kl_to_old(log_ratio, own, "unbiased"), own.any(1)
    return metrics


def agent_gradients(model: nn.Module, loss: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
    """By name, the norm of the part of a loss's gradient that goes through the log-probabilities of each agent."""
    metrics = {}
    parameters = [each for each in model.parameters() if each.requires_grad]
    (slopes,) = torch.autograd.grad(loss, batch.logps, retain_graph=True, materialize_grads=True)
    for name, own in _each_of_several(batch.inputs.get(AGENT_IDS), names_of(batch.inputs)):
        kept = torch.where(own, slopes, 0.0)
        parts = torch.autograd.grad(batch.logps, parameters, kept, retain_graph=True, allow_unused=True)
        norms = [part.norm() for part in parts if part is not None]
        metrics[f"agents/{name}/gradient_norm"] = torch.stack(norms).norm()
    return metrics


def _each_of_several(numbers: Any, names: tuple[str, ...]) -> list[tuple[str, Tensor]]:
    """The agents with masks of their turns or tokens; none if there is only one, whose metrics are everybody's."""
    return [(name, numbers == number) for number, name in enumerate(names)] if len(names) > 1 else []


def _numbers(sampled: Sequence[Sampled], names: tuple[str, ...]) -> Tensor:
    """(B, K) int64 the number of each turn's agent, -1 where there is no turn."""
    return padded([[names.index(name) for name in row.agents] for row in sampled], -1)
