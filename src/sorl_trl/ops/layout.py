"""The turns of a batch laid out once, for operations that would each ask the same of `turn_ids`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class TurnLayout:
    """Where the turns of B trajectories lie. Every operation that takes `turn_ids` takes it instead.

    Made by `turn_layout`. How many turns there are at most, K, is a number of Python's: on a GPU, asking a tensor for
    it waits for the device, which an operation that is given a layout need not do.
    """

    turn_ids: Tensor
    """(B, T) int64, the turn of each model token, -1 elsewhere."""
    num_turns: int
    """K, the turns of the trajectory that has most; 0 where there is no turn."""
    loss_mask: Tensor
    """(B, T) bool, True on model tokens."""
    slots: Tensor
    """(B, T) int64, the column of each token in a (B, K + 1) table of turns: those of no turn go to the last one."""
    turn_mask: Tensor
    """(B, K) bool, True for the turns that a trajectory has."""
    lengths: Tensor
    """(B, K) int64, the tokens of each turn; 0 where it is absent."""
    counts: Tensor
    """(B,) int64, the turns of each trajectory."""


def turn_layout(turn_ids: Tensor | TurnLayout, num_turns: int | None = None) -> TurnLayout:
    """Lay out the turns of `turn_ids` (B, T); a layout is returned as it is.

    Args:
        turn_ids: (B, T) int64, or a layout.
        num_turns: K, where it is known; else the device is asked for it.
    """
    if isinstance(turn_ids, TurnLayout):
        return turn_ids
    if num_turns is None:
        num_turns = int(turn_ids.max()) + 1 if turn_ids.numel() else 0
    loss_mask = turn_ids >= 0
    slots = torch.where(loss_mask, turn_ids, num_turns)
    counts = pad(turn_ids, (1, 0), value=-1).amax(dim=1) + 1
    present = torch.arange(num_turns, device=turn_ids.device) < counts.unsqueeze(1)
    table = turn_ids.new_zeros(len(turn_ids), num_turns + 1)
    lengths = table.scatter_add(1, slots, torch.ones_like(turn_ids))[:, :num_turns]
    return TurnLayout(turn_ids, num_turns, loss_mask, slots, present, lengths, counts)
