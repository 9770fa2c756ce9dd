from __future__ import annotations

import math

import pytest
import torch

from sorl_trl.ops import (
    group_spread,
    information_gains,
    kept_groups,
    matched_advantages,
    separate_turn_advantages,
)
from sorl_trl.ops.credit import normalize_entries

from .batches import float64

SCALES = ("group", "batch", "none")


class TestNormalizeEntries:
    # Entries 1, 3 and 2 of the first group, one of the second.
    X = torch.tensor([[1.0, 3.0], [99.0, 2.0], [7.0, 99.0], [99.0, 99.0]])
    MASK = torch.tensor([[1, 1], [0, 1], [1, 0], [0, 0]])

    def test_by_hand(self):
        centred = torch.tensor([[-1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
        torch.testing.assert_close(normalize_entries(self.X, self.MASK, 2, "none"), centred)
        torch.testing.assert_close(normalize_entries(self.X, self.MASK, 2, "group"), centred / 1.0001)
        # 1, 3, 2 and 7 have the mean 13 / 4.
        sigma = math.sqrt(sum((x - 3.25) ** 2 for x in (1, 3, 2, 7)) / 3)
        torch.testing.assert_close(normalize_entries(self.X, self.MASK, 2, "batch"), centred / (sigma + 1e-4))

    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("value", [0.3, 1e4 / 3])
    def test_equal_entries_give_zero(self, value, scale):
        mask = torch.arange(7) < torch.arange(1, 8).unsqueeze(1)
        assert normalize_entries(torch.full((7, 7), value), mask, 7, scale).abs().max() < 1e-6


class TestSeparateTurnAdvantages:
    # Two trajectories of three turns and of two: gains on all turns but the last, an outcome on the last.
    GAINS = torch.tensor([[1.0, 3.0, math.nan], [2.0, math.nan, math.nan]])
    HAS_GAIN = torch.tensor([[1, 1, 0], [1, 0, 0]])
    OUTCOMES = torch.tensor([[math.nan, math.nan, 1.0], [math.nan, 0.0, math.nan]])
    HAS_OUTCOME = torch.tensor([[0, 0, 1], [0, 1, 0]])
    TURNS = torch.tensor([[1, 1, 1], [1, 1, 0]])
    KINDS = ((GAINS, HAS_GAIN), (OUTCOMES, HAS_OUTCOME))

    def test_by_hand(self):
        # Gains 1, 3, 2 become −1, 1, 0; outcomes 1 and 0 become 0.5 and −0.5; then γ = 1/2.
        expected = torch.tensor([[-1 + 0.5 + 0.125, 1 + 0.25, 0.5], [-0.25, -0.5, 0.0]])
        advantages = separate_turn_advantages(self.KINDS, self.TURNS, 2, 0.5, "none")
        torch.testing.assert_close(advantages, expected)

    def test_an_entry_outside_of_the_turns_does_not_enter(self):
        everywhere = torch.ones(2, 3)
        x = torch.tensor([[1.0, 3.0, 2.0], [2.0, 2.0, math.nan]])
        advantages = separate_turn_advantages([(x, everywhere)], self.TURNS, 2, 1.0, "none")
        assert advantages.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


class TestMatchedAdvantages:
    # One group of three: the first turns share state 7, two later ones state 5, one turn is alone in 0.
    RETURNS = torch.tensor([[1.0, 4.0, 9.0], [2.0, 9.0, 99.0], [3.0, 6.0, 99.0]])
    STATES = torch.tensor([[7, 5, 0], [7, 8, 5], [7, 5, 7]])
    MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0]])

    def test_by_hand(self):
        expected = torch.tensor([[-1.0, -1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
        found = matched_advantages(self.RETURNS, self.STATES, None, self.MASK, 3, "turn")
        torch.testing.assert_close(found, expected)
        sigmas = torch.tensor([[1.0, math.sqrt(2), 1.0]]) + 1e-4
        found = matched_advantages(self.RETURNS, self.STATES, self.STATES, self.MASK, 3, "turn")
        torch.testing.assert_close(found, expected / sigmas)


class TestInformationGains:
    def test_by_hand(self):
        scores = torch.tensor([[-3.0, -1.0, -2.0], [-5.0, -4.5, 9.0], [-5.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
        turns = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
        gains, has_gain = information_gains(scores, turns)
        assert gains.tolist() == [[2.0, -1.0, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
        assert has_gain.tolist() == [[True, True, False], [True, False, False], [False] * 3, [False] * 3]

    def test_a_missing_score_leaves_out_both_gains_that_need_it(self):
        for missing in (math.nan, math.inf, -math.inf):
            gains, has_gain = information_gains(torch.tensor([[-3.0, missing, -2.0, -1.5, -1.0]]), torch.ones(1, 5))
            assert gains.tolist() == [[0.0, 0.0, 0.5, 0.5, 0.0]]
            assert has_gain.tolist() == [[False, False, True, True, False]]


NAN = math.nan


class TestSpread:
    def test_by_hand(self):
        rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 2.0, NAN, 2.0, 5.0, 3.0, NAN, NAN, NAN])
        expected = float64([math.sqrt(1 / 3), math.sqrt(3), 0.0])
        torch.testing.assert_close(group_spread(rewards, 4), expected)

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
