"""Agents that share a policy: numbers for their names, which all processes agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.functional import pad

from sorl_trl.trainers.batch import AGENT_IDS, AGENT_NAMES, gather_rows
from sorl_trl.trainers.sampled import Sampled, padded


def agent_fields(sampled: Sequence[Sampled], turn_ids: Tensor) -> dict[str, Any]:
    """The fields of a batch that say whose turns they are; none if no turn of any process has a name.

    Names and numbers belong to one rollout, and a list has the names of each row, so that both stay together wherever
    a batch is shuffled, split or saved. All processes call it together.
    """
    own = {name for row in sampled for name in _agents(row)}
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


def _agents(row: Sampled) -> Sequence[str]:
    return row.agents or [""] * len(row.turns)


def _numbers(sampled: Sequence[Sampled], names: tuple[str, ...]) -> Tensor:
    """(B, K) int64 the number of each turn's agent, -1 where there is no turn."""
    return padded([[names.index(name) for name in _agents(row)] for row in sampled], -1)
