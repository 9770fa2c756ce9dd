"""MA-RLHF's macro actions (arXiv 2410.02743), which are parts of turns, and the tokens at which the critic is read."""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import turn_broadcast, turn_ends, turn_layout, turn_starts

__all__ = ["VALUE_POOLS", "macro_action_ids", "valued_tokens"]

VALUE_POOLS = ("first", "mean", "last")


def macro_action_ids(turn_ids: Tensor, lengths: Tensor) -> Tensor:
    """Cut turns into macro actions: (B, T) int64, where each token's macro action starts, −1 where `turn_ids` is.

    A turn's macro actions cycle through `lengths` (B, m) or (1, m) int64; the last one has the remaining tokens.
    MA-RLHF averages rewards over a macro action and makes the last token its own macro action; we sum rewards instead.
    """
    turns = turn_layout(turn_ids)
    before = turn_broadcast(turns.lengths.cumsum(1) - turns.lengths, turns)
    place = turns.loss_mask.cumsum(1) - 1 - before  # of a token in its turn
    starts, period = lengths.cumsum(1) - lengths, lengths.sum(1, keepdim=True)
    is_start = turns.loss_mask & ((place % period).unsqueeze(2) == starts.unsqueeze(1)).any(2)
    positions = torch.arange(turn_ids.size(1), device=turn_ids.device)
    return torch.where(turns.loss_mask, torch.where(is_start, positions, -1).cummax(1).values, -1)


def valued_tokens(unit_ids: Tensor, pool: str) -> Tensor:
    """(B, T) bool: the tokens of each unit before which the critic is read: "first", "last", or all for "mean"."""
    if pool == "mean":
        return unit_ids >= 0
    return turn_starts(unit_ids) if pool == "first" else turn_ends(unit_ids)
