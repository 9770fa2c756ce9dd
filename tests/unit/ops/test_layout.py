"""Operations give the same for a layout as for the turn ids that it was made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sorl_trl import ops

TURN_IDS = torch.tensor([[0, 0, -1, 1, 2], [0, -1, -1, -1, -1], [-1, -1, -1, -1, -1]])
OPERATIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "turn_counts": lambda x, turns: ops.turn_counts(turns),
    "turn_mask": lambda x, turns: ops.turn_mask(turns),
    "turn_reduce": lambda x, turns: ops.turn_reduce(x, turns),
    "turn_reduce_sum": lambda x, turns: ops.turn_reduce(x, turns, "sum"),
    "turn_broadcast": lambda x, turns: ops.turn_broadcast(ops.turn_reduce(x, turns), turns),
    "last_token_before_turn": lambda x, turns: ops.last_token_before_turn(turns),
    "aggregate_turns": ops.aggregate_turns,
    "turn_weights": lambda x, turns: ops.turn_weights(turns),
    "turn_clip_fraction": lambda x, turns: ops.turn_clip_fraction(x, turns, 0.2, 0.2, "geometric"),
    **{
        f"importance_ratio_{level}_{mean}": lambda x, turns, level=level, mean=mean: ops.importance_ratio(
            x, turns, level, mean
        )
        for level in ops.IMPORTANCE_SAMPLING_LEVELS
        for mean in ops.TURN_RATIOS
    },
}


def test_hand_worked() -> None:
    layout = ops.turn_layout(TURN_IDS)
    assert layout.num_turns == 3
    assert layout.counts.tolist() == [3, 1, 0]
    assert layout.lengths.tolist() == [[2, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert layout.turn_mask.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert layout.slots.tolist() == [[0, 0, 3, 1, 2], [0, 3, 3, 3, 3], [3] * 5]
    assert torch.equal(layout.loss_mask, TURN_IDS >= 0)


def test_a_layout_of_a_layout_is_itself() -> None:
    layout = ops.turn_layout(TURN_IDS)
    assert ops.turn_layout(layout) is layout


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0)])
def test_nothing_to_lay_out(shape: tuple[int, int]) -> None:
    layout = ops.turn_layout(torch.zeros(shape, dtype=torch.int64))
    assert layout.num_turns == 0
    assert layout.lengths.shape == layout.turn_mask.shape == (shape[0], 0)


@pytest.mark.parametrize("name", OPERATIONS)
@given(
    lengths=st.lists(st.lists(st.integers(1, 3), max_size=4), min_size=1, max_size=4),
    spare=st.integers(0, 2),
    seed=st.integers(0, 2**16),
)
def test_operations_take_either(name: str, lengths: list[list[int]], spare: int, seed: int) -> None:
    """Also a layout with room for more turns than there are: what is beyond them is 0."""
    rows = [[turn for turn, length in enumerate(row) for turn in [turn] * length + [-1]] for row in lengths]
    width = max(1, *map(len, rows))
    turn_ids = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
    x = torch.randn(turn_ids.shape, generator=torch.Generator().manual_seed(seed))
    most = int(turn_ids.max()) + 1
    expected = OPERATIONS[name](x, turn_ids)
    found = OPERATIONS[name](x, ops.turn_layout(turn_ids, most + spare))
    if found.shape != expected.shape:
        assert not found[:, most:].gt(0).any()
        found = found[:, :most]
    torch.testing.assert_close(found, expected)
