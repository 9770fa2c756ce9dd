from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl import ops
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

from . import reference
from .batches import TURN_IDS, normal, quick, turn_id_batches

TAKE_EITHER = {
    "turn_mask": lambda x, turns: ops.turn_mask(turns),
    "turn_reduce": ops.turn_reduce,
    "turn_broadcast": lambda x, turns: turn_broadcast(turn_reduce(x, turns), turns),
    "last_token_before_turn": lambda x, turns: last_token_before_turn(turns),
    "aggregate_turns": ops.aggregate_turns,
    "turn_weights": lambda x, turns: ops.turn_weights(turns),
    "turn_clip_fraction": lambda x, turns: ops.turn_clip_fraction(x, turns, 0.2, 0.2, "geometric"),
    "arithmetic": lambda x, turns: ops.importance_ratio(x, turns, "turn", "arithmetic"),
    "likelihood_falls": lambda x, turns: ops.likelihood_falls(x, turns, torch.ones(len(x)).bool())[0],
}
X = torch.tensor([[1.0, 3.0, 100.0, 5.0, 100.0], [2.0, 1.0, 2.0, 6.0, 100.0], [100.0] * 5])


class TestTurnIdsFromMask:
    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
    def test_numbers_the_runs(self, dtype):
        mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1], [0, 0, 1, 1, 1, 0, 1], [0] * 7], dtype=dtype)
        ids = turn_ids_from_mask(mask)
        assert ids.tolist() == [[0, 0, -1, 1, -1, -1, 2], [-1, -1, 0, 0, 0, -1, 1], [-1] * 7]
        assert ids.dtype == torch.int64


class TestValidateTurnIds:
    @quick
    @given(turn_id_batches())
    def test_accepts_every_valid_batch(self, turn_ids):
        validate_turn_ids(turn_ids, turn_ids >= 0)

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

    @quick
    @given(turn_id_batches())
    def test_equals_the_reference(self, turn_ids):
        starts, ends = torch.zeros_like(turn_ids).bool(), torch.zeros_like(turn_ids).bool()
        for i, turns in enumerate(reference.positions_of_turns(turn_ids)):
            for positions in turns:
                starts[i, positions[0]] = ends[i, positions[-1]] = True
        assert torch.equal(turn_starts(turn_ids), starts)
        assert torch.equal(turn_ends(turn_ids), ends)


class TestMaskedMean:
    def test_by_hand(self):
        x, mask = (
            torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0], [9.0] * 3]),
            torch.tensor([[1, 1, 0], [1, 0, 0], [0] * 3]),
        )
        torch.testing.assert_close(masked_mean(x, mask), torch.tensor(7 / 3))
        torch.testing.assert_close(masked_mean(x, mask, dim=1), torch.tensor([1.5, 4.0, 0.0]))
        torch.testing.assert_close(masked_mean(x, mask, dim=0), torch.tensor([2.5, 2.0, 0.0]))

    def test_mask_broadcasts_both_ways(self):
        x = torch.tensor([[1.0, 3.0], [5.0, 9.0]])
        torch.testing.assert_close(masked_mean(x, torch.tensor([[1], [0]])), torch.tensor(2.0))
        torch.testing.assert_close(
            masked_mean(x[:, :1], torch.tensor([[1, 1], [0, 1]]), dim=0), torch.tensor([1.0, 3.0])
        )


class TestTurnReduceAndBroadcast:
    def test_by_hand(self):
        mean, total = turn_reduce(X, TURN_IDS), turn_reduce(X, TURN_IDS, "sum")
        torch.testing.assert_close(mean, torch.tensor([[2.0, 5.0], [2.0, 3.0], [0.0, 0.0]]))
        torch.testing.assert_close(total, torch.tensor([[4.0, 5.0], [2.0, 9.0], [0.0, 0.0]]))
        expected = [[2.0, 2.0, 0.0, 5.0, 0.0], [2.0, 3.0, 3.0, 3.0, 0.0], [0.0] * 5]
        torch.testing.assert_close(turn_broadcast(mean, TURN_IDS), torch.tensor(expected))

    def test_gradcheck(self):
        x = normal(TURN_IDS).requires_grad_()
        assert torch.autograd.gradcheck(lambda x: turn_broadcast(turn_reduce(x, TURN_IDS), TURN_IDS), x)


class TestLastTokenBeforeTurn:
    def test_by_hand(self):
        turn_ids = torch.tensor([[0, 0, -1, 1, 2], [-1, 0, -1, -1, -1], [-1] * 5])
        assert last_token_before_turn(turn_ids).tolist() == [[-1, 2, 3], [0, -1, -1], [-1, -1, -1]]

    @quick
    @given(turn_id_batches())
    def test_equals_the_reference(self, turn_ids):
        turns = reference.positions_of_turns(turn_ids)
        width = max(len(row) for row in turns)
        expected = [[k[0] - 1 for k in row] + [-1] * (width - len(row)) for row in turns]
        result = last_token_before_turn(turn_ids)
        assert result.dtype == torch.int64
        assert result.tolist() == expected


class TestTurnLayout:
    def test_by_hand(self):
        layout = turn_layout(torch.tensor([[0, 0, -1, 1, 2], [0, -1, -1, -1, -1], [-1] * 5]))
        assert layout.num_turns == 3
        assert layout.counts.tolist() == [3, 1, 0]
        assert layout.lengths.tolist() == [[2, 1, 1], [1, 0, 0], [0, 0, 0]]
        assert layout.turn_mask.tolist() == [[True] * 3, [True, False, False], [False] * 3]
        assert layout.slots.tolist() == [[0, 0, 3, 1, 2], [0, 3, 3, 3, 3], [3] * 5]
        assert turn_layout(layout) is layout

    @pytest.mark.parametrize("name", TAKE_EITHER)
    @quick
    @given(turn_ids=turn_id_batches(), seed=st.integers(0, 99), spare=st.integers(0, 2))
    def test_operations_take_either(self, name, turn_ids, seed, spare):
        """Also a layout with room for more turns than there are: what is beyond them is 0."""
        x, most = normal(turn_ids, seed), turn_layout(turn_ids).num_turns
        expected = TAKE_EITHER[name](x, turn_ids)
        found = TAKE_EITHER[name](x, turn_layout(turn_ids, most + spare))
        if found.shape != expected.shape:
            assert not found[:, most:].gt(0).any()
            found = found[:, :most]
        torch.testing.assert_close(found, expected)
