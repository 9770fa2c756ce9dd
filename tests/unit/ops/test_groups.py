from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.ops import group_spread, kept_groups, leave_one_out_advantages, turn_mask

from . import reference
from .batches import float64, normal, quick, turn_id_batches

NAN = math.nan
rewards_of = st.lists(st.sampled_from([0.0, 0.0, 1.0, 0.3, NAN]), min_size=6, max_size=6)
spreads = st.lists(st.sampled_from([0.0, 1e-7, 0.1, 0.25, 0.5, 0.5001]), min_size=1, max_size=9)
shares = st.sampled_from([0.01, 0.07, 0.25, 0.5, 0.99])


class TestLeaveOneOut:
    def test_outcomes_by_hand(self):
        returns = torch.tensor([[1.0], [0.0], [0.0], [0.0], [5.0], [5.0], [2.0], [4.0]])
        expected = torch.tensor([[1.0], [-1 / 3], [-1 / 3], [-1 / 3], [4 / 3], [4 / 3], [-8 / 3], [0.0]])
        torch.testing.assert_close(leave_one_out_advantages(returns, torch.ones(8, 1), 4), expected)

    def test_turns_by_hand(self):
        """The others of the first earn 2 and 8; the one that has turn 1 earns 4 less from there on."""
        returns = torch.tensor([[1.0, 3.0], [2.0, 9.0], [8.0, 4.0], [9.0, 9.0]])
        mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]])
        expected = torch.tensor([[1 - 5.0, 3 - 1.0], [2 - 4.5, 0.0], [8 - 1.5, 4 - 3.5], [0.0, 0.0]])
        torch.testing.assert_close(leave_one_out_advantages(returns, mask, 4), expected)

    def test_a_turn_that_no_other_has(self):
        """It is credited with what its trajectory earns in all, 4, where the other earns 1."""
        returns, mask = torch.tensor([[4.0, 3.0], [1.0, 9.0]]), torch.tensor([[1, 1], [1, 0]])
        assert leave_one_out_advantages(returns, mask, 2).tolist() == [[3.0, 3.0], [-3.0, 0.0]]

    @quick
    @given(turn_id_batches(), st.integers(0, 99))
    def test_equals_the_reference(self, turn_ids, seed):
        mask = turn_mask(turn_ids)
        returns = normal(turn_ids, seed, columns=mask.size(1))
        rows = [row[:turns] for row, turns in zip(returns.tolist(), mask.sum(1).tolist(), strict=True)]
        expected = torch.zeros_like(returns)
        for i, row in enumerate(reference.leave_one_out(rows, len(rows))):
            expected[i, : len(row)] = float64(row)
        found = leave_one_out_advantages(returns, mask, len(rows))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)

    def test_one_alone_has_nothing_to_be_compared_with(self):
        returns, mask = torch.tensor([[1.0, 3.0], [NAN, NAN]]), torch.tensor([[1, 1], [0, 0]])
        assert leave_one_out_advantages(returns, mask, 2).tolist() == [[0.0, 0.0], [0.0, 0.0]]

    def test_equal_returns_give_0(self):
        returns = torch.full((6, 2), 0.1)
        assert leave_one_out_advantages(returns, torch.ones(6, 2), 6).abs().max() < 1e-6


class TestSpread:
    def test_by_hand(self):
        rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 2.0, NAN, 2.0, 5.0, 3.0, NAN, NAN, NAN])
        expected = float64([math.sqrt(1 / 3), math.sqrt(3), 0.0])
        torch.testing.assert_close(group_spread(rewards, 4), expected)

    @quick
    @given(rewards_of)
    def test_equals_the_reference(self, rewards):
        expected = [reference.std([r for r in group if not math.isnan(r)]) for group in (rewards[:3], rewards[3:])]
        torch.testing.assert_close(group_spread(float64(rewards), 3), float64(expected))

    def test_nobody_scored(self):
        assert group_spread(torch.full((4,), NAN), 2).tolist() == [0.0, 0.0]
        assert group_spread(torch.zeros(0), 2).shape == (0,)


class TestFilter:
    def test_by_hand(self):
        spread = torch.tensor([0.1, 0.0, 0.5, 0.2])
        assert kept_groups(spread, "zero_variance").tolist() == [True, False, True, True]
        assert kept_groups(spread, "top_k", 0.5).tolist() == [False, False, True, True]
        # Variances .01, 0, .25, .04: of .30 in all, .25 is less than 90 %, .29 is not.
        assert kept_groups(spread, "top_p", 0.9).tolist() == [False, False, True, True]
        assert kept_groups(spread, "top_p", 0.8).tolist() == [False, False, True, False]

    @quick
    @given(spreads, shares)
    def test_equals_the_reference(self, spread, share):
        k = math.ceil(round(share * len(spread), 6))
        assert kept_groups(float64(spread), "top_k", share).tolist() == reference.top_k(spread, k)
        assert kept_groups(float64(spread), "top_p", share).tolist() == reference.top_p(spread, share)

    def test_rounding_is_no_spread(self):
        """A standard deviation is never compared with 0: equal rewards of 0.1 may have one of 1e-9."""
        spread = group_spread(torch.tensor([0.1, 0.1 + 1e-8, 0.1, 1.0, 0.0, 1.0]), 3)
        for name in ("zero_variance", "top_k", "top_p"):
            assert kept_groups(spread, name).tolist() == [False, True], name

    def test_a_small_share_keeps_one_group(self):
        """⌊share · N⌋ would be 0."""
        for name in ("top_k", "top_p"):
            assert kept_groups(torch.tensor([0.1, 0.2, 0.3]), name, 0.01).tolist() == [False, False, True], name
            assert kept_groups(torch.tensor([0.1, 0.2, 0.3]), name, 0.0).tolist() == [False, False, True], name

    def test_a_share_of_1_keeps_all_that_differ(self):
        spread = torch.tensor([1e-3, 0.0, 30.0, 2e-6])
        for name in ("top_k", "top_p"):
            assert kept_groups(spread, name, 1.0).tolist() == [True, False, True, True], name

    def test_a_share_is_not_rounded_up_by_rounding(self):
        """0.07 · 100 is 7.000000000000001."""
        assert kept_groups(torch.linspace(1, 2, 100), "top_k", 0.07).sum() == 7

    @pytest.mark.parametrize("name", ["zero_variance", "top_k", "top_p"])
    def test_nothing_differs(self, name):
        assert not kept_groups(torch.zeros(3), name, 0.5).any()
        assert kept_groups(torch.zeros(0), name, 0.5).shape == (0,)

    @pytest.mark.parametrize("name", ["zero_variance", "top_k", "top_p"])
    def test_a_group_with_an_infinite_reward_takes_no_place(self, name):
        spread = group_spread(torch.tensor([0.0, math.inf, 0.0, 1.0]), 2)
        assert spread.isnan().tolist() == [True, False]
        assert kept_groups(spread, name, 0.5).tolist() == [False, True]

    def test_what_is_refused(self):
        with pytest.raises(ValueError, match="`group_filter` is 'best'"):
            kept_groups(torch.ones(2), "best")
        with pytest.raises(ValueError, match=r"`share` is 1\.5"):
            kept_groups(torch.ones(2), "top_k", 1.5)
