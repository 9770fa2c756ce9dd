"""A batch in TRL's form, a dictionary of tensors: how it is read, reduced and split."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from sorl_trl.ops import TurnLayout, turn_layout

logger = logging.getLogger(__name__)

ROW_SCALE = "row_scale"
"""Field of a batch from which trajectories were dropped: the number of all rows divided by the number that remain."""
GENERATED_AT = "generated_at_step"
"""Field of a batch: the number of optimizer steps made before its trajectories were sampled, by the old policy."""
ON_HOST = (GENERATED_AT, "turn_counts", ROW_SCALE)
"""Fields of a batch that stay on the host, where reading them does not wait for the device."""


def loss_mask_of(batch: Mapping[str, Any]) -> Tensor:
    """(B, T), 1 on the tokens that the loss keeps."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def row_scale(batch: Mapping[str, Any]) -> float:
    """The factor that takes dropped rows out of a mean over the rows of a micro-batch: 1 if none was dropped."""
    return float(batch.get(ROW_SCALE, 1.0))


def turns_of(batch: Mapping[str, Any]) -> TurnLayout:
    """The turns of a batch. With `turn_counts`, this does not wait for the device."""
    counts = batch.get("turn_counts")
    return turn_layout(batch["turn_ids"], None if counts is None else int(counts.max()))


def own_rows(gathered: Any, count: int, accelerator: Accelerator) -> Any:
    """This process's `count` rows of a tensor or list that was gathered from all processes."""
    first = accelerator.process_index * count
    return gathered[first : first + count]


def gather_rows(accelerator: Accelerator, values: Tensor, padding: int = 0) -> Tensor:
    """Stack the (B, N) values of all processes, with `padding` where a process has fewer columns."""
    if values.dtype == torch.bool:  # accelerate would make integers of them, but only on the ranks that pad
        return gather_rows(accelerator, values.long(), padding).bool()
    return accelerator.gather(accelerator.pad_across_processes(values, dim=1, pad_index=padding))


def drop(batch: dict[str, Any], keep: Tensor, accelerator: Accelerator) -> None:
    """Take the trajectories outside `keep` out of masks, turns and denominators. All processes call it together.

    In TRL's losses that average over trajectories, a fully masked row still counts as 0. A row dropped here is also
    left out of that mean (`ROW_SCALE`), over all processes and the whole generation batch, so the result does not
    depend on how the batch is split. A row that had no tokens to begin with still counts as 0, as in TRL.

    `keep` is (B,) bool.
    """
    before = loss_mask_of(batch).bool()
    kept, emptied = before & keep.unsqueeze(1), before.any(1) & ~keep
    local = torch.stack([emptied.new_tensor(len(emptied), dtype=torch.long), emptied.sum(), before.sum(), kept.sum()])
    counts = accelerator.gather(local.unsqueeze(0)).sum(0)
    rows, emptied_rows, tokens_before, tokens = counts.tolist()
    if tokens == tokens_before:
        return
    if tokens == 0 and accelerator.is_main_process:
        logger.warning("Every trajectory of this generation batch was dropped: the policy learns nothing from it.")
    batch["tool_mask"] = batch["tool_mask"] * keep.unsqueeze(1)
    batch["turn_ids"] = torch.where(kept, batch["turn_ids"], -1)
    batch["num_items_in_batch"] = counts[-1]
    rows_before = round(rows / row_scale(batch))
    batch[ROW_SCALE] = torch.tensor(rows / max(rows_before - emptied_rows, 1), dtype=torch.float64)


WORTH_SHARING = 0.25
"""Group trajectories by prompt if repeated prompts are at least this fraction of an update's tokens. Our choice."""


def micro_batches(batch: Mapping[str, Any], count: int, per_step: int, shares: bool, processes: int) -> list[Any]:
    """Split a shuffled rollout into `count` micro-batches with equal numbers of rows, `per_step` per optimizer step.

    Rows stay in TRL's order, with two exceptions. If the model reads shared prefixes once (`shares`), rows of one
    prompt are grouped within a step, which changes only the order of its sums. Otherwise, with several `processes`,
    rows are dealt by length, so that no process waits for another's longest micro-batch.
    """
    lengths = (batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)).tolist()
    order = list(range(len(lengths)))
    rows = len(order) // count
    is_shared = False
    if shares:
        prompt_lengths = batch["prompt_mask"].sum(1).tolist()
        prompts = torch.unique(batch["prompt_ids"], dim=0, return_inverse=True)[1].tolist()
        for first in range(0, len(order), rows * per_step):
            step = order[first : first + rows * per_step]
            once = sum({prompts[row]: prompt_lengths[row] for row in step}.values())
            again = sum(prompt_lengths[row] for row in step) - once
            if again >= WORTH_SHARING * sum(lengths[row] for row in step):
                order[first : first + rows * per_step] = sorted(step, key=prompts.__getitem__)
                is_shared = True
    if processes > 1 and not is_shared:
        longest_first = sorted(order, key=lengths.__getitem__, reverse=True)
        rounds = [longest_first[first : first + count] for first in range(0, len(order), count)]
        dealt = [each if number % 2 == 0 else each[::-1] for number, each in enumerate(rounds)]
        order = [each[place] for place in range(count) for each in dealt]
    return [_rows_of(batch, order[first : first + rows]) for first in range(0, len(order), rows)]


def _rows_of(batch: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    def taken(value: Any) -> Any:
        if value is None or (isinstance(value, Tensor) and value.dim() == 0):
            return value
        return value[rows] if isinstance(value, Tensor) else [value[row] for row in rows]

    return {name: taken(value) for name, value in batch.items()}
