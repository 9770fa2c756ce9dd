from __future__ import annotations

import math

import pytest
import torch

from sorl_trl.ops import (
    differing_groups,
    group_spread,
    information_gains,
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
        found = matched_advantages(self.RETURNS, self.STATES, self.MASK, 3, scale=False)
        torch.testing.assert_close(found, expected)
        sigmas = torch.tensor([[1.0, math.sqrt(2), 1.0]]) + 1e-4
        found = matched_advantages(self.RETURNS, self.STATES, self.MASK, 3, scale=True)
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
        assert differing_groups(torch.tensor([0.1, 0.0, 0.5, 2e-6])).tolist() == [True, False, True, True]
        assert differing_groups(torch.zeros(0)).shape == (0,)

    def test_rounding_is_no_spread(self):
        """A standard deviation is never compared with 0: equal rewards of 0.1 may have one of 1e-9."""
        spread = group_spread(torch.tensor([0.1, 0.1 + 1e-8, 0.1, 1.0, 0.0, 1.0]), 3)
        assert differing_groups(spread).tolist() == [False, True]

    def test_a_group_with_an_infinite_reward_does_not_differ(self):
        spread = group_spread(torch.tensor([0.0, math.inf, 0.0, 1.0]), 2)
        assert spread.isnan().tolist() == [True, False]
        assert differing_groups(spread).tolist() == [False, True]
