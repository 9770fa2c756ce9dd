"""Reads the batch that TRL makes of a rollout, and drops trajectories from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing

from sorl_trl.ops import TurnLayout, turn_layout, turn_starts

logger = logging.getLogger(__name__)

ROW_SCALE = "row_scale"
"""Field of a batch from which trajectories were dropped: the number of all rows divided by those that still count."""
GENERATED_AT = "generated_at_step"
"""Field of a batch: the number of optimizer steps made before its trajectories were sampled."""
OLD_SINCE = "old_policy_since_step"
"""Field of a batch: the number of optimizer steps made by the policy that its ratios compare with."""
GOOD_TOKENS = "good_tokens"
"""Field of a batch: the model tokens, over all processes, of trajectories with an advantage of at least 0."""
ON_HOST = (GENERATED_AT, OLD_SINCE, "turn_counts", ROW_SCALE)
"""Fields of a batch that stay on the host, where reading them does not wait for the device."""
IMAGE_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""Fields of a batch that the policy reads besides ids and masks, if its prompts have images."""


def loss_mask_of(batch: Mapping[str, Any]) -> Tensor:
    """(B, T) 1 on the tokens that the loss keeps."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def advantages_of(batch: Mapping[str, Any]) -> Tensor:
    """(B, T), or (B, 1) if all tokens of a trajectory have the same advantage."""
    advantages: Tensor = batch["advantages"]
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages


def row_scale(batch: Mapping[str, Any]) -> float:
    """The factor that takes dropped rows out of a mean over the rows of a micro-batch: 1 if none was dropped."""
    return float(batch.get(ROW_SCALE, 1.0))


def turns_of(batch: Mapping[str, Any]) -> TurnLayout:
    """The turns of a batch; if it has `turn_counts`, without waiting for the device."""
    counts = batch.get("turn_counts")
    return turn_layout(batch["turn_ids"], None if counts is None else int(counts.max()))


def token_count(batch: Mapping[str, Any], accelerator: Accelerator) -> Tensor:
    """() the number of tokens that the loss keeps on all processes: TRL's `num_items_in_batch`."""
    count: Tensor = accelerator.gather(loss_mask_of(batch).sum()).sum()
    return count


def drop(batch: dict[str, Any], keep: Tensor, accelerator: Accelerator) -> None:
    """Take everything outside `keep` out of masks, turns and denominators. All processes call it together.

    In TRL's losses that average over trajectories, a row whose tokens are all masked still counts as 0. A row that is
    dropped here leaves that mean, too (`ROW_SCALE`), over all processes and the whole generation batch, so the result
    does not depend on how the batch is split. A row that had no token before still counts as 0, as in TRL.

    `keep` is (B,) or (B, T) bool.
    """
    keep = keep.unsqueeze(1) if keep.dim() == 1 else keep
    before = loss_mask_of(batch).bool()
    kept = before & keep
    emptied = before.any(1) & ~kept.any(1)
    local = torch.stack([emptied.new_tensor(len(emptied), dtype=torch.long), emptied.sum(), before.sum(), kept.sum()])
    counts = accelerator.gather(local.unsqueeze(0)).sum(0)
    rows, emptied_rows, tokens_before, tokens = counts.tolist()
    if tokens == tokens_before:
        return
    if tokens == 0 and accelerator.is_main_process:
        logger.warning("Every trajectory of this generation batch is dropped: the policy learns nothing from it.")
    batch["tool_mask"] = batch.get("tool_mask", torch.ones_like(batch["completion_mask"])) * keep
    turn_ids = torch.where(kept, batch["turn_ids"], -1)  # may skip an index, so turns are counted again
    batch["turn_ids"] = torch.where(turn_ids >= 0, turn_starts(turn_ids).long().cumsum(1) - 1, -1)
    batch["num_items_in_batch"] = counts[-1]
    rows_before = round(rows / row_scale(batch))
    batch[ROW_SCALE] = torch.tensor(rows / max(rows_before - emptied_rows, 1), dtype=torch.float64)


def ask_policy(trainer: Any, model: Any, batch: Mapping[str, Any], **options: Any) -> Any:
    """The pass of `Forward` over a batch, with values if the policy has a critic. The trainer keeps it."""
    values = trainer._has_critic and model is not trainer.ref_model
    trainer._pass = trainer._forward(model, batch, values=values, **options)
    return trainer._pass


def policy_pass(trainer: Any, batch: Mapping[str, Any]) -> Any:
    """A pass of the current policy over a batch, without gradient. All processes call it together."""
    args, is_training = trainer.args, trainer.model.training
    size = args.per_device_train_batch_size if is_training else args.per_device_eval_batch_size
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, args.gradient_checkpointing_kwargs):
        return ask_policy(trainer, trainer.model, batch, rows=size)
