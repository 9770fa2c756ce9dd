"""Which tokens belong to which turn, and reductions over tokens and turns that ignore masked positions.

Shapes: B trajectories, T completion positions, K turns in the longest trajectory (0 if there is no turn at all). A
mask is 1 (or True) where a position is kept. `turn_ids` is −1 on observations and padding, else the index of the
token's turn. Operations that also take a `TurnLayout` take the result of `turn_layout` for these ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sorl_trl.checks import check_choice

__all__ = [
    "TurnLayout",
    "last_token_before_turn",
    "masked_mean",
    "turn_broadcast",
    "turn_ids_from_mask",
    "turn_layout",
    "turn_reduce",
    "turn_starts",
    "validate_turn_ids",
]


@dataclass(frozen=True)
class TurnLayout:
    """Where the turns of B trajectories lie, as `turn_layout` finds it.

    It stores K as a Python int, so operations that take a layout avoid reading K from a tensor, which waits for the
    GPU.
    """

    turn_ids: Tensor
    """(B, T) int64, the turn of each model token, -1 elsewhere."""
    num_turns: int
    """K, the largest number of turns of a trajectory; 0 if there is no turn."""
    loss_mask: Tensor
    """(B, T) bool, True on model tokens."""
    slots: Tensor
    """(B, T) int64, each token's column in a (B, K + 1) table of turns; the last column is for tokens of no turn."""
    turn_mask: Tensor
    """(B, K) bool, True for the turns that a trajectory has."""
    lengths: Tensor
    """(B, K) int64, the tokens of each turn; 0 where it is absent."""
    counts: Tensor
    """(B,) int64, the turns of each trajectory."""


def turn_layout(turn_ids: Tensor | TurnLayout, num_turns: int | None = None) -> TurnLayout:
    """Make the layout of `turn_ids` (B, T). A layout is returned unchanged.

    Args:
        turn_ids: (B, T) int64, or a layout.
        num_turns: K, if known; otherwise it is read from the device.
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


def turn_ids_from_mask(loss_mask: Tensor, context_ids: Tensor | None = None) -> Tensor:
    """Number the maximal runs of 1s in `loss_mask` (B, T): (B, T) int64, −1 where the mask is 0.

    Use it for masks that come without a record of turns. Two adjacent turns form one run, so they become one turn,
    unless they have different `context_ids` (B, T).
    """
    kept = loss_mask.bool()
    contexts = torch.zeros_like(kept) if context_ids is None else context_ids
    if not kept.size(1):
        return kept.long()
    starts = kept & ~(pad(kept, (1, -1)) & (contexts == pad(contexts, (1, -1))))
    return torch.where(kept, starts.long().cumsum(dim=1) - 1, -1)


def validate_turn_ids(turn_ids: Tensor, loss_mask: Tensor) -> None:
    """Check that `turn_ids` (B, T) can be the turns of `loss_mask` (B, T).

    They must be int64 and −1 exactly where the mask is 0. On the model tokens of each row, they must start at 0, never
    decrease and skip no index.

    Raises:
        ValueError: The ids are wrong; the message names the first wrong row and position and the values there.
    """
    if turn_ids.dtype != torch.int64:
        raise ValueError(f"turn_ids has dtype {turn_ids.dtype}, but must be torch.int64.")
    if turn_ids.shape != loss_mask.shape:
        raise ValueError(f"turn_ids has shape {tuple(turn_ids.shape)}, but loss_mask has {tuple(loss_mask.shape)}.")
    kept = loss_mask.bool()
    misplaced = torch.where(kept, turn_ids < 0, turn_ids != -1)
    highest_before = _highest_before(turn_ids)
    out_of_order = kept & ((turn_ids < highest_before) | (turn_ids > highest_before + 1))
    if misplaced.any():
        row, position = misplaced.nonzero()[0].tolist()
        expected = "0 or more, as loss_mask is 1 there" if kept[row, position] else "-1, as loss_mask is 0 there"
    elif out_of_order.any():
        row, position = out_of_order.nonzero()[0].tolist()
        highest = int(highest_before[row, position])
        expected = f"{highest} or {highest + 1}, as the turn before it is {highest}" if highest >= 0 else "0"
    else:
        return
    raise ValueError(
        f"turn_ids[{row}, {position}] is {int(turn_ids[row, position])}, but must be {expected} "
        f"(row {row} of turn_ids: {turn_ids[row].tolist()})."
    )


def turn_starts(turn_ids: Tensor) -> Tensor:
    """Mark the first token of each turn: (B, T) turn ids to (B, T) bool.

    V(s_k) is read there, because V at position t is the critic's value of the state before token t.
    """
    return turn_ids > _highest_before(turn_ids)


def turn_ends(turn_ids: Tensor) -> Tensor:
    """Mark the last token of each turn: (B, T) turn ids to (B, T) bool."""
    # Reversed, with ids that grow in that direction (an id is less than T), turns start at their last token.
    backwards = torch.where(turn_ids < 0, -1, turn_ids.size(1) - turn_ids).flip(1)
    return turn_starts(backwards).flip(1)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average `x` where `mask` is 1, over `dim` or over everything. The result is 0 where the mask is empty.

    `x` and `mask` may have any shapes that broadcast to each other.
    """
    kept = keep(x, mask)
    count = mask.bool().expand_as(kept)
    if dim is None:
        return kept.sum() / count.sum().clamp(min=1)
    return kept.sum(dim=dim) / count.sum(dim=dim).clamp(min=1)


def turn_reduce(x: Tensor, turn_ids: Tensor | TurnLayout, reduction: str = "mean") -> Tensor:
    """Reduce `x` (B, T) over the tokens of each turn: (B, K), with 0 for turns a trajectory does not have.

    Raises:
        ValueError: `reduction` is neither "mean" nor "sum", or the shapes differ.
    """
    check_choice("reduction", reduction, ("mean", "sum"))
    turns = turn_layout(turn_ids)
    if x.shape != turns.turn_ids.shape:
        raise ValueError(f"x has shape {tuple(x.shape)}, but turn_ids has {tuple(turns.turn_ids.shape)}.")
    kept = keep(x, turns.loss_mask)
    table = kept.new_zeros(len(kept), turns.num_turns + 1)
    sums = table.scatter_add(1, turns.slots, kept)[:, : turns.num_turns]
    return sums if reduction == "sum" else sums / turns.lengths.clamp(min=1)


def turn_broadcast(x_turns: Tensor, turn_ids: Tensor | TurnLayout) -> Tensor:
    """Give each token its turn's entry of `x_turns` (B, K): (B, T), with 0 where `turn_ids` is −1.

    Raises:
        ValueError: `turn_ids` has more turns than `x_turns` has columns.
    """
    turns = turn_layout(turn_ids)
    if turns.num_turns > x_turns.size(1):
        raise ValueError(f"turn_ids has turns up to {turns.num_turns - 1}, but x_turns has {x_turns.size(1)} columns.")
    return pad(x_turns[:, : turns.num_turns], (0, 1)).gather(1, turns.slots)


def last_token_before_turn(turn_ids: Tensor | TurnLayout) -> Tensor:
    """Find the completion position just before each turn's first token: (B, T) turn ids to (B, K) int64.

    Positions count from the start of the completion, so −1 is the last token of the prompt. Turns that a trajectory
    does not have also get −1.
    """
    turns = turn_layout(turn_ids)
    rows, length = turns.turn_ids.shape
    positions = torch.arange(length, device=turns.turn_ids.device).expand(rows, length)
    table = turns.turn_ids.new_full((rows, turns.num_turns + 1), length)
    first = table.scatter_reduce(1, turns.slots, positions, "amin")[:, : turns.num_turns]
    return torch.where(turns.turn_mask, first - 1, -1)


def _highest_before(ids: Tensor) -> Tensor:
    """The highest of the `ids` (B, T) at earlier positions of the row, −1 where there is none."""
    if ids.size(1) == 0:
        return ids
    return pad(ids.cummax(dim=1).values, (1, -1), value=-1)


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def at_least_float32(x: Tensor) -> Tensor:
    """`x` itself if it is float32 or float64, otherwise `x` in float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def in_precision_of(x: Tensor, bound: float | Tensor) -> float | Tensor:
    """`bound` for a comparison with `x`: a tensor is rounded to the precision of `x`, as torch rounds a float."""
    return bound.to(x.dtype) if isinstance(bound, Tensor) else bound


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """`x`, in float32 or better, where `mask` is not 0, and 0 elsewhere.

    A product with the mask would let NaN and inf through (0 · inf = NaN), in the value or in the gradient. This
    function does not, as long as it comes before any other arithmetic.
    """
    return torch.where(mask.bool(), at_least_float32(x), 0.0)


def check_groups(num_generations: int, rows: int, what: str) -> None:
    """Raise ValueError unless `num_generations` divides the number of `rows`; the message calls these `what`."""
    if num_generations < 1 or rows % num_generations:
        raise ValueError(
            f"num_generations is {num_generations}, but must be positive and divide the number of {what}, which is "
            f"{rows}."
        )
