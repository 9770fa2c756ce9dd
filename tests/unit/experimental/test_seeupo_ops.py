from __future__ import annotations

import math

import pytest
import torch

from sorl_trl.experimental.seeupo_ops import (
    ADVANTAGE_LIMIT,
    MULTIPLIER_RANGE,
    backward_turn_advantages,
    next_multiplier,
)
from sorl_trl.ops import turn_mask
from tests.unit.ops.batches import GARBAGE, TURN_IDS, float64, normal

LOW, HIGH = MULTIPLIER_RANGE


class TestAdvantages:
    def test_by_hand(self):
        """Turn 1 compares 1 with 0, whatever the 0.5 that stopped before it has earned."""
        found = backward_turn_advantages(float64([1.0, 0.5, 0.0]), torch.tensor([[1, 1], [1, 0], [1, 1]]))
        expected = float64([[1.0, 0.5**0.5], [0.0, 0.0], [-1.0, -(0.5**0.5)]])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    def test_the_baseline_covers_those_that_have_the_turn(self):
        """What the others earned by stopping is credited in the turn that stopped, and not in one that they lack."""
        has_turn = torch.tensor([[1, 1], [1, 1], [1, 0]])
        low, high = (backward_turn_advantages(float64([0.0, 1.0, earned]), has_turn) for earned in (-9.0, 9.0))
        assert torch.equal(low[:, 1], high[:, 1])
        assert (low[:2, 0] > 0).all() and (high[:2, 0] < 0).all()

    def test_one_far_away_is_cut(self):
        rewards = torch.zeros(40)
        rewards[0] = 1.0
        found = backward_turn_advantages(rewards, torch.ones(40, 1))
        assert found[0].item() == ADVANTAGE_LIMIT == 3.0
        assert found[1].item() == pytest.approx(-1 / 40 / math.sqrt(1 / 40), rel=1e-3)

    def test_blind_to_those_without_a_turn(self):
        mask = turn_mask(TURN_IDS)  # the third has none
        clean = backward_turn_advantages(torch.tensor([1.0, 0.0, 0.0]), mask)
        for garbage in GARBAGE:
            assert torch.equal(backward_turn_advantages(torch.tensor([1.0, 0.0, garbage]), mask), clean)


class TestMultiplier:
    def test_by_hand(self):
        """exp of the mean over the turn's tokens: 1.1 and 1; the third has no such turn."""
        ratio = float64([[1.21, 1.0, 9.0], [2.0, 0.5, 9.0], [9.0, 9.0, 9.0]])
        mask = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0]])
        found = next_multiplier(float64([1.0, 0.9, 1.1]), ratio.log(), mask)
        torch.testing.assert_close(found, float64([1.1, 0.9, 1.1]))

    def test_ratio_and_product_are_cut(self):
        """A ratio of 9 counts 1.2, so that a trajectory at 0.8 gets to 0.96 and not to the bound."""
        found = next_multiplier(float64([0.8, 1.1, 1.0]), float64([[9.0], [9.0], [0.1]]).log(), torch.ones(3, 1))
        torch.testing.assert_close(found, float64([0.96, HIGH, LOW]))

    def test_blind_to_masked(self):
        log_ratio, mask = 0.1 * normal(TURN_IDS), TURN_IDS == 1
        clean = next_multiplier(torch.ones(3), log_ratio, mask)
        for garbage in GARBAGE:
            assert torch.equal(next_multiplier(torch.ones(3), torch.where(mask, log_ratio, garbage), mask), clean)
