from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sorl_trl.experimental.seeupo_ops import (
    ADVANTAGE_LIMIT,
    MULTIPLIER_RANGE,
    backward_turn_advantages,
    next_multiplier,
)
from sorl_trl.ops import turn_mask
from tests.unit.ops.batches import GARBAGE, TURN_IDS, float64, normal, quick, turn_id_batches

LOW, HIGH = MULTIPLIER_RANGE


def reference_advantages(rewards: list[float], has_turn: list[list[bool]]) -> dict[tuple[int, int], float]:
    """Trajectory and turn -> its advantage."""
    found = {}
    for k in range(len(has_turn[0]) if has_turn else 0):
        rows = [i for i, row in enumerate(has_turn) if row[k]]
        there = [rewards[i] for i in rows]
        if not there:
            continue
        mean = math.fsum(there) / len(there)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in there) / max(len(there) - 1, 1))
        found |= {(i, k): min(max((rewards[i] - mean) / (std + 1e-6), -3.0), 3.0) for i in rows}
    return found


def reference_multiplier(multiplier: list[float], log_ratio: Tensor, mask: Tensor) -> list[float]:
    following = []
    for i, before in enumerate(multiplier):
        tokens = [float(log_ratio[i, t]) for t in range(mask.shape[1]) if mask[i, t]]
        if tokens:
            ratio = math.exp(math.fsum(tokens) / len(tokens))
            before = min(max(before * min(max(ratio, 0.8), 1.2), 0.8), 1.2)
        following.append(before)
    return following


class TestAdvantages:
    def test_by_hand(self):
        """Turn 1 compares 1 with 0, whatever the 0.5 that stopped before it has earned."""
        found = backward_turn_advantages(float64([1.0, 0.5, 0.0]), torch.tensor([[1, 1], [1, 0], [1, 1]]))
        torch.testing.assert_close(
            found, float64([[1.0, 0.5**0.5], [0.0, 0.0], [-1.0, -(0.5**0.5)]]), rtol=0, atol=1e-5
        )

    def test_the_baseline_covers_those_that_have_the_turn(self):
        """The trap: what the others earned by stopping changes nothing in the turn that they do not have."""
        has_turn = torch.tensor([[1, 1], [1, 1], [1, 0]])
        low, high = (backward_turn_advantages(float64([0.0, 1.0, earned]), has_turn) for earned in (-9.0, 9.0))
        assert torch.equal(low[:, 1], high[:, 1])
        assert (low[:2, 0] > 0).all() and (high[:2, 0] < 0).all()

    @quick
    @given(turn_id_batches(), st.integers(0, 99))
    def test_equals_the_reference(self, turn_ids, seed):
        rewards, mask = normal(turn_ids, seed, columns=1).squeeze(1), turn_mask(turn_ids)
        expected = reference_advantages(rewards.tolist(), mask.tolist())
        found = backward_turn_advantages(rewards, mask)
        for (i, k), advantage in expected.items():
            assert found[i, k].item() == pytest.approx(advantage, abs=1e-9)
        assert (found[~mask] == 0).all()

    @quick
    @given(turn_id_batches(), st.integers(0, 99), st.floats(0.5, 4.0), st.floats(-2.0, 2.0))
    def test_units_of_the_reward_do_not_count(self, turn_ids, seed, scale, shift):
        rewards, mask = normal(turn_ids, seed, columns=1).squeeze(1), turn_mask(turn_ids)
        one, other = (backward_turn_advantages(each, mask) for each in (rewards, scale * rewards + shift))
        torch.testing.assert_close(other, one, rtol=0, atol=1e-3)

    def test_one_far_away_is_cut(self):
        rewards = torch.zeros(40)
        rewards[0] = 1.0
        found = backward_turn_advantages(rewards, torch.ones(40, 1))
        assert found[0].item() == ADVANTAGE_LIMIT == 3.0
        assert found[1].item() == pytest.approx(-1 / 40 / math.sqrt(1 / 40), rel=1e-3)

    @pytest.mark.parametrize("reward", [0.0, 0.1, 1e6])
    def test_those_that_agree_get_nothing(self, reward):
        found = backward_turn_advantages(torch.full((7,), reward), torch.ones(7, 2))
        assert found.abs().max() < 1e-3

    def test_alone_in_a_turn_gets_nothing(self):
        found = backward_turn_advantages(torch.tensor([1.0, 0.0]), torch.tensor([[1, 1], [1, 0]]))
        assert found[:, 1].tolist() == [0.0, 0.0]

    def test_blind_to_those_without_a_turn(self):
        mask = turn_mask(TURN_IDS)  # the third has none
        clean = backward_turn_advantages(torch.tensor([1.0, 0.0, 0.0]), mask)
        for garbage in GARBAGE:
            assert torch.equal(backward_turn_advantages(torch.tensor([1.0, 0.0, garbage]), mask), clean)

    @pytest.mark.parametrize("shape", [(0, 0), (0, 2), (3, 0)])
    def test_no_turn(self, shape):
        assert backward_turn_advantages(torch.ones(shape[0]), torch.ones(shape)).shape == shape


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

    @quick
    @given(turn_id_batches(), st.integers(0, 99), st.integers(0, 3))
    def test_equals_the_reference(self, turn_ids, seed, turn):
        log_ratio, mask = normal(turn_ids, seed, scale=0.3), turn_ids == turn
        multiplier = normal(turn_ids, seed + 1, columns=1).squeeze(1).abs().clamp(LOW, HIGH)
        found = next_multiplier(multiplier, log_ratio, mask)
        expected = float64(reference_multiplier(multiplier.tolist(), log_ratio, mask))
        torch.testing.assert_close(found, expected)
        assert ((found >= LOW) & (found <= HIGH)).all()

    @quick
    @given(turn_id_batches(), st.integers(0, 99))
    def test_a_policy_that_has_not_moved_changes_nothing(self, turn_ids, seed):
        multiplier = normal(turn_ids, seed, columns=1).squeeze(1).abs().clamp(LOW, HIGH)
        found = next_multiplier(multiplier, torch.zeros(turn_ids.shape), turn_ids == 0)
        assert torch.equal(found, multiplier)

    def test_it_has_no_gradient(self):
        log_ratio = torch.ones(2, 3, requires_grad=True)
        assert not next_multiplier(torch.ones(2), log_ratio, torch.ones(2, 3)).requires_grad

    def test_blind_to_masked(self):
        log_ratio, mask = 0.1 * normal(TURN_IDS), TURN_IDS == 1
        clean = next_multiplier(torch.ones(3), log_ratio, mask)
        for garbage in GARBAGE:
            assert torch.equal(next_multiplier(torch.ones(3), torch.where(mask, log_ratio, garbage), mask), clean)

    @pytest.mark.parametrize("shape", [(0, 0), (0, 2), (3, 0)])
    def test_no_token(self, shape):
        assert next_multiplier(torch.ones(shape[0]), torch.ones(shape), torch.ones(shape)).tolist() == [1.0] * shape[0]
