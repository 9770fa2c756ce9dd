from __future__ import annotations

import pytest
import torch

from sorl_trl.ops import (
    last_token_before_turn,
    masked_mean,
    turn_broadcast,
    turn_ids_from_mask,
    turn_layout,
    turn_reduce,
    turn_starts,
    validate_turn_ids,
)
from sorl_trl.ops.masking import turn_ends

from .batches import TURN_IDS

X = torch.tensor([[1.0, 3.0, 100.0, 5.0, 100.0], [2.0, 1.0, 2.0, 6.0, 100.0], [100.0] * 5])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_turn_ids_number_the_runs_of_a_mask(dtype):
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1], [0, 0, 1, 1, 1, 0, 1], [0] * 7], dtype=dtype)
    ids = turn_ids_from_mask(mask)
    assert ids.tolist() == [[0, 0, -1, 1, -1, -1, 2], [-1, -1, 0, 0, 0, -1, 1], [-1] * 7]
    assert ids.dtype == torch.int64


class TestValidateTurnIds:
    @pytest.mark.parametrize(
        ("row", "mask", "message"),
        [
            ([0, 0, -1], [1, 1, 1], r"turn_ids\[1, 2\] is -1, but must be 0 or more"),
            ([0, 0, 0], [1, 1, 0], r"turn_ids\[1, 2\] is 0, but must be -1"),
            ([0, -2, 0], [1, 0, 1], r"turn_ids\[1, 1\] is -2, but must be -1"),
            ([-1, 1, 1], [0, 1, 1], r"turn_ids\[1, 1\] is 1, but must be 0 \(row 1 of turn_ids: \[-1, 1, 1\]\)"),
            ([0, -1, 2], [1, 0, 1], r"turn_ids\[1, 2\] is 2, but must be 0 or 1"),
            ([0, 1, 0], [1, 1, 1], r"turn_ids\[1, 2\] is 0, but must be 1 or 2"),
        ],
    )
    def test_names_what_is_wrong(self, row, mask, message):
        with pytest.raises(ValueError, match=message):
            validate_turn_ids(torch.tensor([[0, 0, 1], row]), torch.tensor([[1, 1, 1], mask]))

    def test_refuses_another_shape_or_dtype(self):
        with pytest.raises(ValueError, match=r"shape \(3, 5\), but loss_mask has \(3, 4\)"):
            validate_turn_ids(TURN_IDS, torch.ones(3, 4))
        with pytest.raises(ValueError, match=r"dtype torch.int32"):
            validate_turn_ids(TURN_IDS.int(), TURN_IDS >= 0)


class TestTurnStartsAndEnds:
    # Two turns that touch, one with an observation inside, one of a single token.
    IDS = torch.tensor([[0, 0, 1, -1, 1, 1, -1, 2], [-1, 0, -1, 0, -1, -1, -1, -1], [-1] * 8])

    def test_by_hand(self):
        starts, ends = turn_starts(self.IDS), turn_ends(self.IDS)
        assert starts.int().tolist() == [[1, 0, 1, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0, 0, 0], [0] * 8]
        assert ends.int().tolist() == [[0, 1, 0, 0, 0, 1, 0, 1], [0, 0, 0, 1, 0, 0, 0, 0], [0] * 8]
        assert starts.dtype == ends.dtype == torch.bool


def test_masked_mean_by_hand():
    x, mask = (
        torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0], [9.0] * 3]),
        torch.tensor([[1, 1, 0], [1, 0, 0], [0] * 3]),
    )
    torch.testing.assert_close(masked_mean(x, mask), torch.tensor(7 / 3))
    torch.testing.assert_close(masked_mean(x, mask, dim=1), torch.tensor([1.5, 4.0, 0.0]))
    torch.testing.assert_close(masked_mean(x, mask, dim=0), torch.tensor([2.5, 2.0, 0.0]))


def test_turn_reduce_and_broadcast_by_hand():
    mean, total = turn_reduce(X, TURN_IDS), turn_reduce(X, TURN_IDS, "sum")
    torch.testing.assert_close(mean, torch.tensor([[2.0, 5.0], [2.0, 3.0], [0.0, 0.0]]))
    torch.testing.assert_close(total, torch.tensor([[4.0, 5.0], [2.0, 9.0], [0.0, 0.0]]))
    expected = [[2.0, 2.0, 0.0, 5.0, 0.0], [2.0, 3.0, 3.0, 3.0, 0.0], [0.0] * 5]
    torch.testing.assert_close(turn_broadcast(mean, TURN_IDS), torch.tensor(expected))


def test_last_token_before_turn_by_hand():
    turn_ids = torch.tensor([[0, 0, -1, 1, 2], [-1, 0, -1, -1, -1], [-1] * 5])
    assert last_token_before_turn(turn_ids).tolist() == [[-1, 2, 3], [0, -1, -1], [-1, -1, -1]]


def test_turn_layout_by_hand():
    layout = turn_layout(torch.tensor([[0, 0, -1, 1, 2], [0, -1, -1, -1, -1], [-1] * 5]))
    assert layout.num_turns == 3
    assert layout.counts.tolist() == [3, 1, 0]
    assert layout.lengths.tolist() == [[2, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert layout.turn_mask.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert layout.slots.tolist() == [[0, 0, 3, 1, 2], [0, 3, 3, 3, 3], [3] * 5]
    assert turn_layout(layout) is layout
