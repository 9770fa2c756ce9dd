"""Turns cut into macro actions: where they begin."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sorl_trl.ops import macro_action_ids, valued_tokens

from .batches import quick, turn_id_batches

# A turn of five tokens, an observation, two turns that touch; a turn of three tokens; no turn.
TURN_IDS = torch.tensor([[0, 0, 0, 0, 0, -1, 1, 1, 2], [-1, 0, 0, 0, -1, -1, -1, -1, -1], [-1] * 9])


def spans_of(ids: Tensor) -> list[list[int]]:
    """The positions of each macro action of a row, in order."""
    found: dict[int, list[int]] = {}
    for position, start in enumerate(ids.tolist()):
        if start >= 0:
            found.setdefault(start, []).append(position)
    return list(found.values())


class TestMacroActionIds:
    def test_n_grams_by_hand(self) -> None:
        ids = macro_action_ids(TURN_IDS, torch.tensor([[2]]))
        assert ids.tolist() == [[0, 0, 2, 2, 4, -1, 6, 6, 8], [-1, 1, 1, 3, -1, -1, -1, -1, -1], [-1] * 9]

    def test_several_lengths_by_hand(self) -> None:
        """They begin again after the last one, and with each turn, and each trajectory has its own."""
        ids = macro_action_ids(TURN_IDS, torch.tensor([[1, 2], [2, 5], [1, 1]]))
        assert ids.tolist() == [[0, 1, 1, 3, 4, -1, 6, 7, 8], [-1, 1, 1, 3, -1, -1, -1, -1, -1], [-1] * 9]

    @quick
    @given(turn_ids=turn_id_batches(), tokens=st.integers(1, 9), seed=st.integers(0, 99))
    def test_a_partition_that_crosses_no_turn(self, turn_ids: Tensor, tokens: int, seed: int) -> None:
        random = torch.tensor([Random(seed + row).sample((1, 2, 3, 5, 10), 5) for row in range(len(turn_ids))])
        for lengths in (torch.tensor([[tokens]]), random):
            ids = macro_action_ids(turn_ids, lengths)
            assert torch.equal(ids >= 0, turn_ids >= 0)
            for row, (own, turns) in enumerate(zip(ids, turn_ids, strict=True)):
                longest = lengths.expand(len(turn_ids), -1)[row].max()
                for span in spans_of(own):
                    assert own[span[0]] == span[0] and len(span) <= longest
                    assert len({int(turn) for turn in turns[span]}) == 1


def test_valued_tokens_by_hand() -> None:
    ids = macro_action_ids(TURN_IDS[:2], torch.tensor([[3]]))
    first, last = (valued_tokens(ids, pool).int().tolist() for pool in ("first", "last"))
    assert first == [[1, 0, 0, 1, 0, 0, 1, 0, 1], [0, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert last == [[0, 0, 1, 0, 1, 0, 0, 1, 1], [0, 0, 0, 1, 0, 0, 0, 0, 0]]
    assert torch.equal(valued_tokens(ids, "mean"), TURN_IDS[:2] >= 0)
