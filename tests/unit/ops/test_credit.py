from __future__ import annotations

import math

import torch

from sorl_trl.ops import differing_groups, group_spread, matched_advantages

from .batches import float64


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
