from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.ops import (
    explained_variance,
    group_turn_advantages,
    leave_one_out_advantages,
    outcome_advantages,
    summed_advantages,
    token_gae,
    turn_layout,
    turn_returns,
    turn_rewards_to_tokens,
    turn_std,
    whiten,
)

from .batches import TURN_IDS, float64, normal, quick

MASK = TURN_IDS >= 0
TURNS = turn_layout(TURN_IDS).turn_mask
discounts = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def test_turn_returns_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 4.0], [3.0, 8.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    expected = torch.tensor([[3.0, 4.0, 4.0], [7.0, 8.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(turn_returns(rewards, mask, 0.5), expected)


def test_gae_by_hand_skips_observations():
    rewards = torch.tensor([[0.0, 7.0, 7.0, 1.0, 7.0]])
    values = torch.tensor([[0.5, 8.0, 8.0, 0.25, 8.0]])
    advantages, returns = token_gae(rewards, values, torch.tensor([[1, 0, 0, 1, 0]]), gamma=0.5, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[-0.1875, 0.0, 0.0, 0.75, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.3125, 0.0, 0.0, 1.0, 0.0]]))


def test_turn_rewards_to_tokens_by_hand():
    turn_ids = torch.tensor([[0, -1, 0, 1, -1], [-1, 0, 0, -1, -1], [-1] * 5])
    rewards = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0], [9.0] * 3])  # no trajectory has a third turn
    expected = [[0.0, 0.0, 1.0, 2.0, 0.0], [0.0, 0.0, 3.0, 0.0, 0.0], [0.0] * 5]
    assert turn_rewards_to_tokens(rewards, turn_ids).tolist() == expected


class TestGroupTurnAdvantages:
    # Three trajectories earn 1, 0 and 1 in all; the fourth has no turn.
    RETURNS = torch.tensor([[1.0, 3.0], [0.0, 99.0], [1.0, 1.0], [99.0, 99.0]])
    TURN_MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]])

    def test_by_hand(self):
        # The baselines are 2/3 in turn 0, and 2/3 + 1 in turn 1, before which the first has earned −2 and the third 0.
        # Mean squared deviations 17/18, 8/18, 5/18 of three counted trajectories, so σ² = 5/6.
        expected = torch.tensor([[1 / 3, 4 / 3], [-2 / 3, 0.0], [1 / 3, -2 / 3], [0.0, 0.0]])
        unscaled = group_turn_advantages(self.RETURNS, self.TURN_MASK, 4, scale=False)
        torch.testing.assert_close(unscaled, expected)
        sigma = math.sqrt(5 / 6)
        torch.testing.assert_close(turn_std(self.RETURNS, self.TURN_MASK, 4), torch.full((4, 1), sigma))
        scaled = group_turn_advantages(self.RETURNS, self.TURN_MASK, 4)
        torch.testing.assert_close(scaled, expected / (sigma + 1e-4))

    @quick
    @given(st.lists(st.sampled_from([0.0, 0.3, 1.0]) | st.floats(-2, 2, width=16), min_size=8, max_size=8), st.data())
    def test_an_outcome_reward_alone_gives_the_advantage_of_grpo(self, outcomes, data):
        counts = torch.tensor(data.draw(st.lists(st.integers(1, 5), min_size=8, max_size=8)))
        turns = torch.arange(5) < counts.unsqueeze(1)
        outcome = torch.tensor(outcomes, dtype=torch.float64)
        rewards = torch.zeros(8, 5, dtype=torch.float64)
        rewards[torch.arange(8), counts - 1] = outcome
        grouped = outcome.view(2, 4)
        grpo = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        expected = torch.where(turns, grpo.view(8, 1), 0.0)
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
            advantages = group_turn_advantages(turn_returns(rewards.to(dtype), turns, 1.0), turns, 4)
            torch.testing.assert_close(advantages.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(turn_std(turn_returns(rewards, turns, 1.0), turns, 8), outcome.std().expand(8, 1))

    @pytest.mark.parametrize("value", [0.3, 1e4 / 3])
    def test_equal_returns_give_zero_whatever_the_turn_counts(self, value):
        turns = torch.arange(7) < torch.arange(1, 8).unsqueeze(1)
        advantages = group_turn_advantages(torch.full((7, 7), value), turns, 7)
        assert advantages.abs().max() < 1e-6


class TestLeaveOneOut:
    def test_turns_by_hand(self):
        """The others of the first earn 2 and 8; the one that has turn 1 earns 4 less from there on."""
        returns = torch.tensor([[1.0, 3.0], [2.0, 9.0], [8.0, 4.0], [9.0, 9.0]])
        mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]])
        expected = torch.tensor([[1 - 5.0, 3 - 1.0], [2 - 4.5, 0.0], [8 - 1.5, 4 - 3.5], [0.0, 0.0]])
        torch.testing.assert_close(leave_one_out_advantages(returns, mask, 4), expected)

    def test_one_alone_has_nothing_to_be_compared_with(self):
        returns, mask = torch.tensor([[1.0, 3.0], [math.nan, math.nan]]), torch.tensor([[1, 1], [0, 0]])
        assert leave_one_out_advantages(returns, mask, 2).tolist() == [[0.0, 0.0], [0.0, 0.0]]


class TestGradient:
    """A policy that decides in turn 0 whether to go on, and in turn 1 whether to be right."""

    GO_ON, RIGHT, STOPPING, GOING_ON = 0.4, 0.3, 0.7, 0.2
    # Per kind of trajectory: its probability, turn rewards, and the gradients of log π in both turns, by logits.
    KINDS = (
        (1 - GO_ON, (STOPPING,), (-GO_ON, 0.0)),
        (GO_ON * RIGHT, (GOING_ON, 1.0), (1 - GO_ON, 1 - RIGHT)),
        (GO_ON * (1 - RIGHT), (GOING_ON, 0.0), (1 - GO_ON, -RIGHT)),
    )
    EXACT = (GO_ON * (1 - GO_ON) * (GOING_ON + RIGHT - STOPPING), GO_ON * RIGHT * (1 - RIGHT))

    def expected(self, advantages_of, size):
        """The expectation of the estimate, over all groups of `size` trajectories."""
        total = torch.zeros(2, dtype=torch.float64)
        for group in itertools.product(self.KINDS, repeat=size):
            rewards = float64([[*earned, 0.0][:2] for _, earned, _ in group])
            turns = torch.tensor([[True, len(earned) == 2] for _, earned, _ in group])
            advantages = advantages_of(turn_returns(rewards, turns, 1.0), turns, size)
            slopes = float64([slope for _, _, slope in group])
            total += math.prod(probability for probability, _, _ in group) * (advantages * slopes).mean(0)
        return total

    @pytest.mark.parametrize("size", [2, 3, 5])
    def test_the_baseline_is_not_biased_where_the_policy_decides_when_to_stop(self, size):
        """The group's own mean holds each trajectory itself, which scales the gradient by (G − 1) / G as in GRPO."""
        exact = float64(self.EXACT)
        torch.testing.assert_close(self.expected(leave_one_out_advantages, size), exact)
        unscaled = self.expected(functools.partial(group_turn_advantages, scale=False), size)
        torch.testing.assert_close(unscaled, (size - 1) / size * exact)


class TestWhiten:
    def test_by_hand(self):
        x, mask = torch.tensor([[1.0, 3.0, 50.0], [5.0, 50.0, 50.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
        torch.testing.assert_close(whiten(x, mask), torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
        torch.testing.assert_close(whiten(x, mask, shift_mean=False), torch.tensor([[2.0, 3.0, 0.0], [4.0, 0.0, 0.0]]))

    @pytest.mark.parametrize("shift_mean", [True, False])
    def test_fewer_than_two_values_and_equal_values(self, shift_mean):
        x = torch.full((2, 3), 0.3, requires_grad=True)
        for kept in (0, 1, 6):
            mask = torch.arange(6).view(2, 3) < kept
            whitened = whiten(x, mask, shift_mean)
            (gradient,) = torch.autograd.grad(whitened.sum(), x)
            expected = torch.where(mask, 0.0 if shift_mean else 0.3, 0.0)
            torch.testing.assert_close(whitened, expected, rtol=0, atol=1e-7)
            assert gradient.isfinite().all()


class TestExplainedVariance:
    def test_by_hand(self):
        returns, mask = torch.tensor([[0.0, 1.0, 9.0], [2.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 1, 0]])
        values = torch.tensor([[0.0, 0.0, 9.0], [2.0, 2.0, -9.0]])
        # Residuals 0, 1, 0, 1: their variance is 1/4, that of the returns 5/4.
        torch.testing.assert_close(explained_variance(values, returns, mask), torch.tensor(0.8))
        torch.testing.assert_close(explained_variance(returns - 5, returns, mask), torch.tensor(1.0))
        torch.testing.assert_close(explained_variance(torch.ones(2, 3), returns, mask), torch.tensor(0.0))
        torch.testing.assert_close(explained_variance(-returns, returns, mask), torch.tensor(-3.0))

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


class TestOutcomes:
    """TRL's advantages, which enter no turn; trl.GRPOTrainer is compared in tests/contract/test_trl_parity.py."""

    @pytest.mark.parametrize("scale", ["group", "batch", "none"])
    def test_what_is_not_scored_changes_nothing(self, scale):
        rewards = torch.tensor([1.0, math.nan, 3.0, 2.0, 7.0, math.nan], dtype=torch.float64)
        advantages, _ = outcome_advantages(rewards, 3, scale)
        kept = torch.tensor([1.0, 3.0, 2.0, 7.0], dtype=torch.float64)
        assert advantages[[0, 2, 3, 4]].tolist() == pytest.approx(outcome_advantages(kept, 2, scale)[0].tolist())
        assert advantages[[1, 5]].tolist() == [0.0, 0.0]

    def test_a_trajectory_that_no_function_scored_is_not_in_the_sum(self):
        """The rewards of each function are compared first: its sum of nothing would be a 0 among them."""
        unscored = torch.full((1, 2), math.nan, dtype=torch.float64)
        rewards = torch.tensor([[1.0, 5.0], [3.0, 5.5], [2.0, 9.0]], dtype=torch.float64)
        weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
        advantages, std = summed_advantages(torch.cat([rewards, unscored]), weights, 4)
        expected, expected_std = summed_advantages(rewards, weights, 3)
        assert advantages.tolist() == pytest.approx([*expected.tolist(), 0.0])
        assert std[0].item() == pytest.approx(expected_std[0].item())

    def test_a_spread_takes_two_values_unless_there_is_but_one(self):
        """NaN is no σ of 0, which would say that rewards are equal."""
        rewards = torch.tensor([1.0, math.nan, math.nan, 3.0, 5.0, math.nan, 2.0, 2.0, 2.0])
        _, std = outcome_advantages(rewards, 3, "group")
        assert std.tolist() == pytest.approx([math.nan] * 3 + [math.sqrt(2)] * 3 + [0.0] * 3, nan_ok=True)
        assert outcome_advantages(rewards[:2], 1, "group")[1].tolist() == [0.0, 0.0]
