"""One pass of a model over a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sorl_trl.trainers.critic.model import ValuesBesideLogps
from sorl_trl.trainers.no_padding import CompletionsAlone, NoPadding, width_matters
from sorl_trl.trainers.prompts import IMAGE_INPUTS


@dataclass(frozen=True)
class Pass:
    """What one forward pass gives for the tokens of completions."""

    logps: Tensor
    entropies: Tensor | None = None
    values: Tensor | None = None
    aux_loss: Tensor | None = None


class Forward:
    """Runs the trainer's models over batches."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __call__(
        self,
        model: Any,
        batch: Mapping[str, Any],
        *,
        entropies: bool = False,
        router: bool = False,
        values: bool = False,
        rows: int | None = None,
    ) -> Pass:
        trainer = self._trainer
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        length = batch["completion_ids"].size(1)
        prompt = ids.size(1) - length
        found = ValuesBesideLogps(model) if values else None
        wrapped = model if found is None else found
        if ids.device.type == "cpu":
            policy = (
                trainer.accelerator.unwrap_model(trainer.ref_model) if model is trainer.ref_model else trainer.model
            )
            wrapped = CompletionsAlone(wrapped, policy, prompt)
        if not width_matters(trainer.model):
            wrapped = NoPadding(wrapped, prompt)
        given = {name: batch[name] for name in IMAGE_INPUTS if name in batch}
        logps, entropy, aux_loss = trainer._get_per_token_logps_and_entropies(
            wrapped, ids, mask, length, batch_size=rows, compute_entropy=entropies, compute_aux_loss=router, **given
        )
        return Pass(logps, entropy, None if found is None else found.values(length), aux_loss)
