"""One forward of the model over the new tokens of rows in consecutive slots."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from sorl_trl.rollout.slots.cache import Aim, SlotCache


class Forward:
    """Runs the model on new tokens, and returns the logits after each row's last token.

    The mask has four dimensions, which models use as it is: boolean for sdpa, additive for eager attention.
    """

    def __init__(self, model: Any, base: PreTrainedModel) -> None:
        self._model = model
        self._device = base.device
        self._is_eager = base.config.get_text_config()._attn_implementation == "eager"
        self._dtype = base.dtype
        takes = inspect.signature(type(base).forward).parameters
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def decode(self, cache: SlotCache, last_ids: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Read one token in each of the first slots, whose rows hold `lengths` tokens: logits (B, V)."""
        positions = torch.tensor(lengths, device=self._device)
        slots = torch.arange(len(lengths), device=self._device)
        cache.aim = Aim(0, len(lengths), max(lengths) + 1, slots, positions)
        return self._run(cache, torch.tensor(last_ids, device=self._device)[:, None], positions[:, None])

    def prefill(
        self, cache: SlotCache, first: int, new_ids: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> torch.Tensor:
        """Read `new_ids` in the slots from `first` on, whose rows hold `lengths` tokens: logits (B, V).

        Shorter rows are padded in front, so that the last column is every row's last token. No mask includes padding.
        """
        sizes = torch.tensor([len(ids) for ids in new_ids])
        width = int(sizes.max())
        past = torch.tensor(lengths)
        columns = torch.arange(width) - (width - sizes)[:, None]  # negative for padding
        rows, column = torch.nonzero(columns >= 0, as_tuple=True)
        # Padding gets the position of its row's first new token; any position that the model has would do.
        positions = past[:, None] + columns.clamp(min=0)
        ids = torch.tensor([[0] * (width - len(each)) + list(each) for each in new_ids])
        tokens = rows.to(self._device), column.to(self._device)
        written = (rows + first).to(self._device), positions[rows, column].to(self._device)
        cache.aim = Aim(first, len(new_ids), int((past + sizes).max()), *written, tokens)
        return self._run(cache, ids.to(self._device), positions.to(self._device))

    def _run(self, cache: SlotCache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert cache.aim is not None
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._mask(positions, cache.aim.width),
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **self._only_last,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _mask(self, positions: torch.Tensor, width: int) -> torch.Tensor:
        """(B, 1, tokens, width): each token attends to itself and to the tokens before it in its row."""
        reads = torch.arange(width, device=self._device) <= positions[:, None, :, None]
        if not self._is_eager:
            return reads
        zero = torch.zeros((), dtype=self._dtype, device=self._device)
        return torch.where(reads, zero, torch.finfo(self._dtype).min)
