"""Keys and values of many rows, each in a slot of its own, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache


@dataclass(frozen=True)
class Aim:
    """Where one forward writes and what it reads: a run of slots, from `first` on, one for each row of the batch."""

    first: int
    rows: int
    width: int
    """Positions that are read, from 0 on."""
    slots: torch.Tensor
    """(N,): the slot of each token that is written."""
    positions: torch.Tensor
    """(N,): its position in there."""
    tokens: tuple[torch.Tensor, torch.Tensor] | None = None
    """The row of the batch and the column of each token that is written. None: each row has one token, all are."""


class SlotCache(Cache):
    """The interface that models of transformers write to, over buffers of (slots, heads, capacity, head size).

    Whatever lies in a slot behind its row's last token is zero, for attention multiplies it by weights of 0, and
    0·NaN is not 0. So who takes tokens away clears them (`clear`), and only tokens are written, never padding.
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
        """Write what the layer computed for the aimed-at tokens, and return all that their rows attend to."""
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
        """Rows differ in it, and all that depends on it (positions, mask) is given to the model."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """What a mask would have to span; it is given to the model."""
        assert self.aim is not None
        return self.aim.width, 0

    @property
    def bytes_per_token(self) -> int:
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        return [buffer for pair in self._buffers for buffer in pair]

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of slots into others. Slots may be on both sides: all are read first."""
        for buffer in self._tensors():
            read, written = self._index(sources, buffer), self._index(targets, buffer)
            front = buffer[:, :, :length]
            front.index_copy_(0, written, front.index_select(0, read))

    def clear(self, slots: Sequence[int], start: int, end: int) -> None:
        """Forget positions `start` to `end` of slots."""
        for buffer in self._tensors():
            buffer[:, :, start:end].index_fill_(0, self._index(slots, buffer), 0)

    @staticmethod
    def _index(slots: Sequence[int], buffer: torch.Tensor) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.long, device=buffer.device)

    def rebuild(self, slots: int, capacity: int, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Have so many slots of so many positions. They hold what `copy` would have put there, and nothing else."""
        self.slots, self.capacity = slots, capacity
        for layer, pair in enumerate(self._buffers):
            keys, values = (self._empty(buffer) for buffer in pair)
            for new, old in ((keys, pair[0]), (values, pair[1])):
                read, written = self._index(sources, old), self._index(targets, old)
                new[:, :, :length].index_copy_(0, written, old[:, :, :length].index_select(0, read))
            self._buffers[layer] = keys, values
