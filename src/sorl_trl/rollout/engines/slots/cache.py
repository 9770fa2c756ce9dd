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
    """What one forward writes and reads. Its rows occupy consecutive slots, the first of which is `first`."""

    first: int
    rows: int
    width: int
    """The forward reads positions 0 to `width` − 1."""
    slots: torch.Tensor
    """(N,): the slot that each new token is written to."""
    positions: torch.Tensor
    """(N,): the position of each new token in its slot."""
    tokens: tuple[torch.Tensor, torch.Tensor] | None = None
    """The batch row and the column of each new token. None when decoding, where each row has exactly one."""


class SlotCache(Cache):
    """A `Cache` of transformers over one key and one value buffer per layer: (slots, heads, capacity, head size).

    Every position after a row's last token is zero, because attention multiplies it by a weight of 0, and 0·NaN is not
    0. Therefore, only tokens are written, never padding, and code that removes tokens must `clear` their positions.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.capacity = capacity
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
        new = states[:, :, 0] if aim.tokens is None else states.transpose(1, 2)[aim.tokens]
        buffer[aim.slots, :, aim.positions] = new.to(buffer.dtype)
        return buffer[aim.first : aim.first + aim.rows, :, : aim.width]

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

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of some slots to others. A slot may be both a source and a target."""
        for buffer in self._tensors():
            read, written = self._index(sources, buffer), self._index(targets, buffer)
            front = buffer[:, :, :length]
            front.index_copy_(0, written, front.index_select(0, read))

    def clear(self, slots: Sequence[int], start: int, end: int) -> None:
        """Zero positions `start` to `end` − 1 of some slots."""
        for buffer in self._tensors():
            buffer[:, :, start:end].index_fill_(0, self._index(slots, buffer), 0)

    @staticmethod
    def _index(slots: Sequence[int], buffer: torch.Tensor) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.long, device=buffer.device)

    def rebuild(self, slots: int, capacity: int, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Resize the buffers. They then hold what `copy` would have put into the targets, and zeros elsewhere."""
        self.slots, self.capacity = slots, capacity
        for layer, pair in enumerate(self._buffers):
            keys, values = (self._empty(buffer) for buffer in pair)
            for new, old in ((keys, pair[0]), (values, pair[1])):
                read, written = self._index(sources, old), self._index(targets, old)
                new[:, :, :length].index_copy_(0, written, old[:, :, :length].index_select(0, read))
            self._buffers[layer] = keys, values


class Forward:
    """Runs the model on new tokens of rows in consecutive slots, and returns the logits after each row's last one.

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
