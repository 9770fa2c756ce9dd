"""A cache with a slot of keys and values for each of many rows, and one forward pass of the model with it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel


@dataclass(frozen=True)
class Aim:
    """What one forward writes and reads: a row of its batch for each of some slots."""

    slots: torch.Tensor
    """(B,)"""
    beside: slice | None
    """The same slots, if they are side by side."""
    width: int
    """The forward reads positions 0 to `width` − 1."""
    rows: torch.Tensor
    """(N,): the batch row of each new token."""
    columns: torch.Tensor
    """(N,): its column."""
    positions: torch.Tensor
    """(N,): its position in its slot."""


class SlotCache(Cache):
    """A `Cache` of transformers over one key and one value buffer per layer: (slots, heads, capacity, head size).

    Every position after a row's last token is zero, because attention multiplies it by a weight of 0, and 0·NaN is not
    0. Therefore, only tokens are written, never padding, and code that removes tokens must `clear` their positions.
    """

    def __init__(self, slots: int = 0, capacity: int = 0) -> None:
        super().__init__(layers=[])
        self.slots, self.capacity = slots, capacity
        self.aim: Aim | None = None
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of the new tokens, and return all that their rows attend to."""
        assert self.aim is not None
        while len(self._buffers) <= layer_idx:
            self._buffers.append((self._empty(key_states), self._empty(value_states)))
        keys, values = self._buffers[layer_idx]
        return self._write(keys, key_states), self._write(values, value_states)

    def _empty(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros(self.slots, states.shape[1], self.capacity, states.shape[3])

    def _write(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        aim = self.aim
        assert aim is not None
        new = states.transpose(1, 2)[aim.rows, aim.columns]
        buffer[aim.slots[aim.rows], :, aim.positions] = new.to(buffer.dtype)
        read = buffer[:, :, : aim.width]
        return read.index_select(0, aim.slots) if aim.beside is None else read[aim.beside]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0, because rows differ in length: the caller passes the model positions and mask."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The size of a mask that the model would build; unused, because it is given one."""
        assert self.aim is not None
        return self.aim.width, 0

    @property
    def bytes_per_token(self) -> int:
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        return [buffer for pair in self._buffers for buffer in pair]

    def copy(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the first `length` positions of the first slot of each pair to the second."""
        for buffer in self._tensors():
            _move(buffer, buffer, moves, length)

    def clear(self, slot: int, start: int, end: int) -> None:
        """Zero positions `start` to `end` − 1 of a slot."""
        for buffer in self._tensors():
            buffer[slot, :, start:end] = 0

    def rebuild(self, slots: int, capacity: int, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Resize the buffers. They then hold what `copy` would have put into the targets, and zeros elsewhere."""
        self.slots, self.capacity = slots, capacity
        for layer, pair in enumerate(self._buffers):
            keys, values = (self._empty(buffer) for buffer in pair)
            _move(pair[0], keys, moves, length)
            _move(pair[1], values, moves, length)
            self._buffers[layer] = keys, values


def _move(old: torch.Tensor, new: torch.Tensor, moves: Sequence[tuple[int, int]], length: int) -> None:
    sources, targets = torch.tensor(moves, dtype=torch.long, device=old.device).view(-1, 2).unbind(1)
    new[:, :, :length].index_copy_(0, targets, old[:, :, :length].index_select(0, sources))


class Forward:
    """Runs the model on new tokens of rows in slots, and returns the logits after each row's last one.

    The mask has four dimensions, which models use as it is: boolean for sdpa, additive for eager attention.
    """

    def __init__(self, model: Any, base: PreTrainedModel) -> None:
        self._model = model
        self._device = base.device
        self._is_eager = base.config.get_text_config()._attn_implementation == "eager"
        self._dtype = base.dtype
        takes = inspect.signature(type(base).forward).parameters
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def __call__(
        self, cache: SlotCache, slots: Sequence[int], new_ids: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> torch.Tensor:
        """Read `new_ids` in the slots of rows that hold `lengths` tokens: logits (B, V).

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
        beside = slice(slots[0], slots[0] + len(slots))
        cache.aim = Aim(
            torch.tensor(slots).to(self._device),
            beside if [*slots] == [*range(cache.slots)[beside]] else None,
            int((past + sizes).max()),
            *(each.to(self._device) for each in (rows, column, positions[rows, column])),
        )
        positions = positions.to(self._device)
        output = self._model(
            input_ids=ids.to(self._device),
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
