from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.ops import information_gains, separate_turn_advantages, state_advantages
from sorl_trl.ops.credit import normalize_entries

from . import reference
from .batches import float64, normal, quick

SCALES = ("group", "batch", "none")


def random_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two groups of three trajectories with up to four turns: numbers (6, 4), and which turns there are."""
    counts = normal(torch.zeros(6, 1), seed + 1).mul(2).abs().round()
    return normal(torch.zeros(6, 4), seed), torch.arange(4) < counts


def some_of(mask: torch.Tensor, seed: int) -> torch.Tensor:
    return mask & (normal(mask, seed) > -0.5)


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

    @quick
    @given(st.integers(0, 99), st.sampled_from(SCALES))
    def test_equals_the_reference(self, seed, scale):
        x, mask = random_batch(seed)
        expected = [
            row
            for first in (0, 3)
            for row in reference.normalize_entries(
                *(t[first : first + 3].tolist() for t in (x, mask)), scale, x[mask].tolist()
            )
        ]
        torch.testing.assert_close(normalize_entries(x, mask, 3, scale), float64(expected), rtol=1e-9, atol=1e-12)

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

    def test_a_missing_gain_is_no_zero(self):
        """Gains of 5 are all alike: were the missing ones zeros, 5 would be far above the mean."""
        gains = torch.where(self.HAS_GAIN.bool(), 5.0, 0.0)
        advantages = separate_turn_advantages([(gains, self.HAS_GAIN), self.KINDS[1]], self.TURNS, 2, 1.0, "group")
        outcomes = separate_turn_advantages([self.KINDS[1]], self.TURNS, 2, 1.0, "group")
        torch.testing.assert_close(advantages, outcomes)
        wrong = separate_turn_advantages([(gains, self.TURNS), self.KINDS[1]], self.TURNS, 2, 1.0, "group")
        assert (wrong - outcomes).abs().max() > 0.5

    @quick
    @given(st.integers(0, 99), st.sampled_from(SCALES), st.sampled_from([0.0, 0.5, 1.0]))
    def test_equals_the_reference(self, seed, scale, gamma):
        x, turns = random_batch(seed)
        y, masks = normal(x, seed + 2), [some_of(turns, seed + 3), some_of(turns, seed + 4)]
        total = [[0.0] * 4 for _ in range(6)]
        for values, mask in zip((x, y), masks, strict=True):
            for first in (0, 3):
                rows = reference.normalize_entries(
                    *(t[first : first + 3].tolist() for t in (values, mask)), scale, values[mask].tolist()
                )
                for i, row in enumerate(rows):
                    total[first + i] = [a + b for a, b in zip(total[first + i], row, strict=True)]
        expected = [
            [sum(gamma ** (j - k) * row[j] for j in range(k, 4)) if keep else 0.0 for k, keep in enumerate(mask)]
            for row, mask in zip(total, turns.tolist(), strict=True)
        ]
        advantages = separate_turn_advantages([(x, masks[0]), (y, masks[1])], turns, 3, gamma, scale)
        torch.testing.assert_close(advantages, float64(expected), rtol=1e-9, atol=1e-12)

    def test_outcomes_alone_give_the_advantage_of_grpo(self):
        outcomes, counts = normal(torch.zeros(8)), torch.tensor([1, 2, 3, 1, 4, 2, 2, 3])
        turns = torch.arange(4) < counts.unsqueeze(1)
        last = torch.arange(4) == counts.unsqueeze(1) - 1
        separate = separate_turn_advantages([(outcomes.unsqueeze(1).expand(8, 4), last)], turns, 4, 1.0, "group")
        grouped = outcomes.view(2, 4)
        grpo = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        torch.testing.assert_close(separate, torch.where(turns, grpo.view(8, 1), 0.0))

    def test_an_entry_outside_of_the_turns_does_not_enter(self):
        everywhere = torch.ones(2, 3)
        x = torch.tensor([[1.0, 3.0, 2.0], [2.0, 2.0, math.nan]])
        advantages = separate_turn_advantages([(x, everywhere)], self.TURNS, 2, 1.0, "none")
        assert advantages.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


class TestStateAdvantages:
    # One group of three: the first turns share state 7, two later ones state 5, one turn is alone in 0.
    RETURNS = torch.tensor([[1.0, 4.0, 9.0], [2.0, 9.0, 99.0], [3.0, 6.0, 99.0]])
    STATES = torch.tensor([[7, 5, 0], [7, 8, 5], [7, 5, 7]])
    MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0]])

    def test_by_hand(self):
        expected = torch.tensor([[-1.0, -1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
        torch.testing.assert_close(state_advantages(self.RETURNS, self.STATES, self.MASK, 3, scale=False), expected)
        sigmas = torch.tensor([[1.0, math.sqrt(2), 1.0]]) + 1e-4
        torch.testing.assert_close(state_advantages(self.RETURNS, self.STATES, self.MASK, 3), expected / sigmas)

    def test_a_state_twice_in_one_trajectory(self):
        returns, states = torch.tensor([[1.0, 3.0], [8.0, 99.0]]), torch.tensor([[4, 4], [5, 4]])
        advantages = state_advantages(returns, states, torch.tensor([[1, 1], [1, 0]]), 2, scale=False)
        assert advantages.tolist() == [[-1.0, 1.0], [0.0, 0.0]]

    @quick
    @given(st.integers(0, 99), st.booleans())
    def test_equals_the_reference(self, seed, scale):
        returns, turns = random_batch(seed)
        states = (normal(returns, seed + 2) * 1.5).round().long() * (2**61)
        expected = [
            row
            for first in (0, 3)
            for row in reference.state_advantages(
                *(t[first : first + 3].tolist() for t in (returns, states, turns)), scale
            )
        ]
        advantages = state_advantages(returns, states, turns, 3, scale)
        torch.testing.assert_close(advantages, float64(expected), rtol=1e-9, atol=1e-12)


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

    @quick
    @given(st.integers(0, 99))
    def test_equals_the_reference(self, seed):
        scores, turns = random_batch(seed)
        scores[some_of(turns, seed + 5).logical_not()] = math.nan
        gains, has_gain = information_gains(scores, turns)
        for i, count in enumerate(turns.sum(1).tolist()):
            expected = reference.information_gains(scores[i].tolist(), count)
            assert has_gain[i].tolist() == [gain is not None for gain in expected]
            assert gains[i].tolist() == [gain or 0.0 for gain in expected]
