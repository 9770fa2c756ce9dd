"""Agents that share a policy: numbers for their names, which all processes agree on, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from sorl_trl.methods import MicroBatch, ScoredRollout
from sorl_trl.ops import is_outside, kl_to_old, turn_broadcast
from sorl_trl.trainers.batch import AGENT_IDS, AGENT_NAMES, gather_rows
from sorl_trl.trainers.returned import padded
from sorl_trl.types import Trajectory


def agent_fields(trajectories: Sequence[Trajectory], names: tuple[str, ...], turn_ids: Tensor) -> dict[str, Any]:
    """The fields of a batch that give each turn's agent, by its number in `names`; none without names.

    Names belong to one rollout and stay with their numbers when a batch is shuffled, split or saved.
    """
    if not names:
        return {}
    numbers = padded([[names.index(name) + 1 for name in each.agents] for each in trajectories], 0)
    by_token = turn_broadcast(numbers.to(turn_ids.device), turn_ids) - 1
    return {AGENT_IDS: by_token, AGENT_NAMES: [names] * len(trajectories)}


def agents_of_all(accelerator: Accelerator, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The fields of a `ScoredRollout` that give each turn's agent, whether the turn is masked or not.

    There are none if no turn has a name. All processes call it together.
    """
    names = tuple(sorted({*gather_object(sorted({name for each in trajectories for name in each.agents}))}))
    if not any(names):
        return {}
    numbers = padded([[names.index(name) for name in each.agents] for each in trajectories], -1)
    numbers = gather_rows(accelerator, numbers.to(accelerator.device), padding=-1)
    return {"agents": numbers, "agent_names": names}


def names_of(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the agents in a batch or micro-batch, in the order of their numbers; empty if there are none."""
    return tuple(batch[AGENT_NAMES][0]) if AGENT_NAMES in batch else ()


def _each_of_several(numbers: Any, names: tuple[str, ...]) -> list[tuple[str, Tensor]]:
    """Where each agent's turns or tokens are, by name; empty for one agent, since its metrics are the overall ones."""
    return [(f"agents/{name}", numbers == number) for number, name in enumerate(names)] if len(names) > 1 else []


def log_agents(logged: dict[str, list[float]], scored: ScoredRollout) -> None:
    """Log each agent's share of the turns, and the mean reward of the trajectories in which it acts."""
    for name, own in _each_of_several(scored.agents, scored.agent_names):
        logged[f"{name}/turn_share"].append((own.sum() / scored.turns.counts.sum()).item())
        logged[f"{name}/reward"].append(scored.totals()[own.any(1)].nanmean().item())


def agent_metrics(batch: MicroBatch) -> dict[str, Any]:
    """By metric name, values for each agent's tokens or trajectories, and where to average them."""
    metrics: dict[str, Any] = {}
    for name, agents in _each_of_several(batch.inputs.get(AGENT_IDS), names_of(batch.inputs)):
        own = agents & batch.loss_mask
        metrics[f"{name}/advantage_square"] = batch.advantages.square().expand_as(batch.ratio), own
        metrics[f"{name}/clip_fraction"] = is_outside(batch.ratio, *batch.clip_range[:2]).float(), own
        metrics[f"{name}/kl_to_old"] = kl_to_old(batch.log_ratio, own, "unbiased"), own.any(1)
    return metrics
