"""Takes trajectories, turns or tokens out of a scored batch, so that they count nowhere: not as zeros either.

TRL's loss forgets a token that a mask rejects, but not its row: where it averages over trajectories, a row without a
token is a row of 0. A row that is dropped here leaves that mean too, over all ranks and the whole generation batch, so
that the result is the same however the batch is split. What else is a mean over trajectories must be multiplied by
`row_scale` likewise.

Two means of TRL's are over the tokens of a micro-batch: `loss_type="bnpo"`, which is refused beside options that drop
(`config_rules.dropping_problems`), and the entropy bonus, to which a micro-batch without a token adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import Tensor

from sorl_trl.ops import turn_starts
from sorl_trl.trainers.loss.micro_batch import ROW_SCALE, loss_mask_of, row_scale

logger = get_logger(__name__)

_MEANS_OVER_ROWS = ("turn", "minirl", "grpo", "dr_grpo", "sapo", "luspo")
"""Loss types that divide by trajectories. The others divide by tokens, which `num_items_in_batch` counts."""


def drop(output: dict[str, Any], keep: Tensor, accelerator: Accelerator) -> None:
    """Take what is not in `keep` out of masks, turns and denominators. All ranks call it together.

    Where nothing is dropped on any rank, the batch stays as it is. Where everything is, a warning says so. A row that
    had no token before (its search was down, or it is masked as truncated) goes on counting as 0, as in TRL. The turns
    that are left are numbered anew: advantages must be on tokens before a turn is dropped.

    Args:
        output: what `_generate_and_score_completions` makes of B trajectories, with `turn_ids`.
        keep: (B,) or (B, T) bool, False for what is to be dropped.
        accelerator: of the trainer.
    """
    keep = keep.unsqueeze(1) if keep.dim() == 1 else keep
    before = loss_mask_of(output).bool()
    kept = before & keep
    emptied = before.any(1) & ~kept.any(1)
    local = torch.stack([emptied.new_tensor(len(emptied), dtype=torch.long), emptied.sum(), before.sum(), kept.sum()])
    counts = accelerator.gather(local.unsqueeze(0)).sum(0)
    rows, emptied_rows, tokens_before, tokens = counts.tolist()
    if tokens == tokens_before:
        return
    if tokens == 0:
        logger.warning("Every trajectory of this generation batch is dropped: the policy learns nothing from it.")
    output["tool_mask"] = output.get("tool_mask", torch.ones_like(output["completion_mask"])) * keep
    output["turn_ids"] = _renumbered(torch.where(kept, output["turn_ids"], -1))
    output["num_items_in_batch"] = counts[-1]
    rows_before = round(rows / row_scale(output))
    output[ROW_SCALE] = torch.tensor(rows / max(rows_before - emptied_rows, 1), dtype=torch.float64)


def _renumbered(turn_ids: Tensor) -> Tensor:
    """(B, T) turn ids that skip no index, of turns in the same order."""
    return torch.where(turn_ids >= 0, turn_starts(turn_ids).long().cumsum(1) - 1, -1)


@contextmanager
def counting_kept_rows(trainer: Any, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The batch for TRL's loss, within which policy term and reference KL are means over the rows that were kept.

    TRL's loss is linear in the advantages, up to their sign, and in `beta`.

    Args:
        trainer: a `GRPOTrainer`, whose `beta` is another within.
        inputs: a micro-batch, which is not written to.
    """
    scale, beta = row_scale(inputs), trainer.beta
    if scale == 1.0 or trainer.args.loss_type not in _MEANS_OVER_ROWS:
        yield dict(inputs)
        return
    trainer.beta = beta * scale
    try:
        yield {**inputs, "advantages": inputs["advantages"] * scale}
    finally:
        trainer.beta = beta
