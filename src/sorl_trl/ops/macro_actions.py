"""MA-RLHF's macro actions (arXiv 2410.02743), which are parts of turns; and the tokens at which a unit is valued."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import torch
from torch import Tensor

from .masking import turn_broadcast, turn_ends, turn_layout, turn_starts

__all__ = ["RANDOM_LENGTHS", "VALUE_POOLS", "macro_action_ids", "random_lengths", "valued_tokens"]

RANDOM_LENGTHS = (1, 2, 3, 5, 10)
VALUE_POOLS = ("first", "mean", "last")


def macro_action_ids(turn_ids: Tensor, lengths: Tensor) -> Tensor:
    """Cut turns into macro actions: (B, T) int64, the position where the token's one starts, −1 where `turn_ids` is.

    A turn's last one has what is left. MA-RLHF makes the last token one of its own, because it averages rewards over
    a macro action, the outcome among them. We add rewards up.

    Args:
        turn_ids: (B, T).
        lengths: (B, m) int64, or (1, m) for all trajectories: the tokens of a turn's macro actions, again and again.
    """
    turns = turn_layout(turn_ids)
    before = turn_broadcast(turns.lengths.cumsum(1) - turns.lengths, turns)
    place = turns.loss_mask.cumsum(1) - 1 - before  # of a token in its turn
    starts, period = lengths.cumsum(1) - lengths, lengths.sum(1, keepdim=True)
    is_start = turns.loss_mask & ((place % period).unsqueeze(2) == starts.unsqueeze(1)).any(2)
    positions = torch.arange(turn_ids.size(1), device=turn_ids.device)
    return torch.where(turns.loss_mask, torch.where(is_start, positions, -1).cummax(1).values, -1)


def random_lengths(trajectories: Iterable[Sequence[int]]) -> Tensor:
    """Put `RANDOM_LENGTHS` into an order for each trajectory, for `macro_action_ids`: (B, 5) int64.

    Its token ids decide, so the order is the same in every process and after a resume. MA-RLHF has one order for a
    batch, with each length several times, and what then is left of a response is one macro action.
    """
    orders = [Random(str([*ids])).sample(RANDOM_LENGTHS, len(RANDOM_LENGTHS)) for ids in trajectories]
    return torch.tensor(orders, dtype=torch.int64).view(-1, len(RANDOM_LENGTHS))


def valued_tokens(unit_ids: Tensor, pool: str) -> Tensor:
    """Mark the tokens of a unit before which a critic values it: the "first", the "last", or all, for the "mean".

    (B, T) ids, which grow along a trajectory and are −1 off the model tokens, to (B, T) bool.
    """
    if pool == "mean":
        return unit_ids >= 0
    return turn_starts(unit_ids) if pool == "first" else turn_ends(unit_ids)
