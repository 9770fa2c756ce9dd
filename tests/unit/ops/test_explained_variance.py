from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.ops import explained_variance

from . import reference
from .batches import TURN_IDS, assert_blind_to_masked, normal, quick, turn_id_batches

MASK = TURN_IDS >= 0


class TestExplainedVariance:
    def test_by_hand(self):
        returns, mask = torch.tensor([[0.0, 1.0, 9.0], [2.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 1, 0]])
        values = torch.tensor([[0.0, 0.0, 9.0], [2.0, 2.0, -9.0]])
        # Residuals 0, 1, 0, 1: their variance is 1/4, that of the returns 5/4.
        torch.testing.assert_close(explained_variance(values, returns, mask), torch.tensor(0.8))
        torch.testing.assert_close(explained_variance(returns - 5, returns, mask), torch.tensor(1.0))
        torch.testing.assert_close(explained_variance(torch.ones(2, 3), returns, mask), torch.tensor(0.0))
        torch.testing.assert_close(explained_variance(-returns, returns, mask), torch.tensor(-3.0))

    @quick
    @given(turn_id_batches(), st.integers(0, 99))
    def test_equals_the_reference(self, turn_ids, seed):
        mask, values, returns = turn_ids >= 0, normal(turn_ids, seed), normal(turn_ids, seed + 1)
        expected = reference.explained_variance(values[mask].tolist(), returns[mask].tolist())
        result = explained_variance(values, returns, mask).item()
        assert result == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)

    @quick
    @given(st.integers(0, 99), st.floats(0.01, 100), st.floats(-5, 5))
    def test_unit_and_offset_of_the_return_do_not_matter(self, seed, scale, offset):
        values, returns = normal(MASK, seed), normal(MASK, seed + 1)
        moved = explained_variance(scale * values, scale * returns + offset, MASK)
        torch.testing.assert_close(moved, explained_variance(values, returns, MASK))

    @pytest.mark.parametrize("count", [0, 1, 2, 50_000])
    @pytest.mark.parametrize("value", [0.0, 0.3, -1e4 / 3])
    def test_undefined_for_equal_returns_and_fewer_than_two(self, count, value):
        mask = torch.arange(50_001) < count
        returns = torch.where(mask, value, normal(mask[None])[0].float())
        returns[1::2] *= 1 + torch.finfo(torch.float32).eps  # what adding rewards up in another order may do
        assert explained_variance(torch.arange(50_001.0), returns, mask).isnan()

    def test_a_small_spread_is_defined(self):
        returns = torch.tensor([1.0, 1.0001])
        torch.testing.assert_close(explained_variance(returns, returns, torch.ones(2)), torch.tensor(1.0))

    def test_half_precision_is_reduced_in_float32(self):
        returns = torch.tensor([0.0, 1.0] * 1500).bfloat16()
        values = returns + torch.tensor([0.0, 0.0078125] * 1500).bfloat16()
        result = explained_variance(values, returns, torch.ones(3000))
        assert result.dtype == torch.float32
        assert result.item() == pytest.approx(1 - 0.0078125**2, abs=1e-6)

    def test_blind_to_masked(self):
        values, returns = normal(MASK, 1), normal(MASK, 2)
        assert_blind_to_masked(lambda x: explained_variance(x, returns, MASK), values, MASK)
        assert_blind_to_masked(lambda x: explained_variance(values, x, MASK), returns, MASK)
        garbage = torch.where(MASK, values, math.inf), torch.where(MASK, returns, math.inf)  # inf − inf is NaN
        torch.testing.assert_close(explained_variance(*garbage, MASK), explained_variance(values, returns, MASK))
