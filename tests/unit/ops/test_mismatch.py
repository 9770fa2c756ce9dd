from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.ops import engine_ratio, is_vetoed, turn_mismatch, within

from . import reference
from .batches import TURN_IDS, normal, quick, turn_id_batches


class TestTurnMismatch:
    def test_by_hand(self):
        ratios = torch.tensor([[1.0, 4.0, 9.0, 2.0, 9.0], [8.0, 1.0, 1.0, 1.0, 9.0], [9.0] * 5])
        expected = torch.tensor([[2.0, 2.0], [8.0, 1.0], [1.0, 1.0]])
        torch.testing.assert_close(turn_mismatch(ratios.log(), TURN_IDS), expected)

    @quick
    @given(turn_id_batches(), st.integers(0, 99))
    def test_equals_the_reference(self, turn_ids, seed):
        log_ratio = normal(turn_ids, seed)
        found = turn_mismatch(log_ratio, turn_ids)
        for (i, k), expected in reference.turn_mismatch(log_ratio, turn_ids).items():
            assert found[i, k].item() == pytest.approx(expected)


class TestIsVetoed:
    def test_by_hand(self):
        ratios = torch.tensor([[1.0, 0.5, 0.0, 2.0, 0.0], [0.09, 9.0, 9.0, 9.0, 0.0], [0.0] * 5])
        assert is_vetoed(ratios.log(), TURN_IDS, 0.1).tolist() == [False, True, False]
        assert is_vetoed(ratios.log(), TURN_IDS, 0.6).tolist() == [True, True, False]

    @quick
    @given(turn_id_batches(), st.integers(0, 99), st.floats(0.05, 0.9))
    def test_equals_the_reference(self, turn_ids, seed, least):
        log_ratio = normal(turn_ids, seed)
        assert is_vetoed(log_ratio, turn_ids, least).tolist() == reference.is_vetoed(log_ratio, turn_ids, least)


def test_within_by_hand():
    ratio = torch.tensor([0.5, 1.0, 2.0, math.nan])
    assert within(ratio, 0.5, 1.5).tolist() == [True, True, False, False]
    assert within(ratio, None, 1.0).tolist() == [True, True, False, False]
    assert within(ratio, 1.0, None).tolist() == [False, True, True, False]
    assert within(ratio, None, None).tolist() == [True] * 4


class TestEngineRatio:
    MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
    D = torch.tensor([[0.5, -0.5, 9.0], [1.0, math.nan, 1.0]], dtype=torch.float64)

    def test_by_hand(self):
        ratio = engine_ratio(self.D, self.MASK, "token_truncate", None, 2.0)
        assert ratio.flatten().tolist() == pytest.approx([math.exp(0.5), math.exp(-0.5), 1.0, 2.0, 1.0, 2.0])
        masked = engine_ratio(self.D, self.MASK, "token_mask", 0.8, 2.0)
        assert masked.flatten().tolist() == pytest.approx([math.exp(0.5), 0.0, 1.0, 0.0, 1.0, 0.0])
        assert engine_ratio(self.D, self.MASK, "sequence_truncate").flatten().tolist() == pytest.approx(
            [1.0, math.exp(2.0)]
        )
        assert engine_ratio(self.D, self.MASK, "sequence_mask", None, 3.0).tolist() == [[1.0], [0.0]]

    def test_another_mode_is_named(self):
        with pytest.raises(ValueError, match="vllm_importance_sampling_mode"):
            engine_ratio(self.D, self.MASK, "turn_mask")
