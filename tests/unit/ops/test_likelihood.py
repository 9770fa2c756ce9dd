from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.ops import good_trajectories, likelihood_falls

from . import reference
from .batches import TURN_IDS, normal, quick, turn_id_batches

ALL = torch.tensor([True, True, True])


def loss(log_ratio, turn_ids, good):
    """Of a generation batch that is one micro-batch."""
    falls, _ = likelihood_falls(log_ratio, turn_ids, good)
    return falls.sum() / ((turn_ids >= 0) & good.unsqueeze(1)).sum().clamp(min=1)


class TestLikelihoodFalls:
    def test_by_hand(self):
        log_ratio = torch.tensor([[-0.5, 0.2, 9.0, 0.4, 9.0], [-0.1, 0.3, -0.1, -0.1, 9.0], [9.0] * 5])
        falls, has_fallen = likelihood_falls(log_ratio, TURN_IDS, ALL)
        # Turn 0 of trajectory 0 has lost 0.3, and its first token 0.5; of the other turns one token has lost 0.1, but
        # its turn has lost that too, and two have, but their turn has gained 0.1.
        torch.testing.assert_close(falls, torch.tensor([[0.5, 0.0], [0.1, 0.0], [0.0, 0.0]]))
        assert has_fallen.tolist() == [[True, False], [True, False], [False, False]]

    @quick
    @given(turn_id_batches(), st.integers(0, 99), st.lists(st.booleans(), min_size=4, max_size=4))
    def test_loss_and_gradient_equal_the_reference(self, turn_ids, seed, good):
        log_ratio, good = normal(turn_ids, seed).requires_grad_(), good[: len(turn_ids)]
        value = loss(log_ratio, turn_ids, torch.tensor(good))
        expected, slopes = reference.llds(log_ratio.detach(), turn_ids, good)
        assert value.item() == pytest.approx(expected, abs=1e-12)
        (gradient,) = torch.autograd.grad(value, log_ratio)
        for at, slope in ((tuple(at), gradient[tuple(at)].item()) for at in torch.ones_like(gradient).nonzero()):
            assert slope == pytest.approx(slopes.get(tuple(int(n) for n in at), 0.0), abs=1e-12)

    def test_a_bad_trajectory_is_not_guarded(self):
        falls, has_fallen = likelihood_falls(normal(TURN_IDS), TURN_IDS, torch.tensor([False, True, True]))
        assert falls[0].tolist() == [0.0, 0.0] and not has_fallen[0].any()
        assert falls[1].sum() > 0

    def test_an_unchanged_policy_has_no_gradient(self):
        """Not the one-sided derivative of max(0, x) at 0, of tokens beside others that have fallen either."""
        log_ratio = torch.zeros(TURN_IDS.shape, requires_grad=True)
        likelihood_falls(log_ratio, TURN_IDS, ALL)[0].sum().backward()
        assert log_ratio.grad.abs().max() == 0
        moved = torch.tensor([[-1.0, 0.0, 0.0, 0.0, 0.0]] * 3, requires_grad=True)
        likelihood_falls(moved, TURN_IDS, ALL)[0].sum().backward()
        assert moved.grad[0].tolist() == [-1.0, 0.0, 0.0, 0.0, 0.0]


class TestGoodTrajectories:
    def test_by_hand(self):
        advantages = torch.tensor([[1.0, -3.0, 9.0, 2.5, 9.0], [-0.1] * 5, [-5.0] * 5])
        assert good_trajectories(advantages, TURN_IDS >= 0).tolist() == [True, False, True]
        assert good_trajectories(torch.tensor([[-1.0], [0.0], [2.0]]), TURN_IDS >= 0).tolist() == [False, True, True]

    def test_the_rounding_of_equal_rewards_is_not_bad(self):
        """Eight float32 rewards of 0.1 have a mean that is not 0.1, and 1 / (σ + 1e-4) blows up what is left."""
        rewards = torch.full((8, 1), 0.1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        off_by_rounding = torch.cat([advantages, torch.tensor([[-9e-4], [-1.1e-3]])])
        assert good_trajectories(off_by_rounding, torch.ones(10, 3)).tolist() == [True] * 9 + [False]

    @quick
    @given(turn_id_batches(), st.integers(0, 99))
    def test_equals_the_reference(self, turn_ids, seed):
        advantages = normal(turn_ids, seed)
        good = good_trajectories(advantages, turn_ids >= 0)
        assert good.tolist() == reference.good_trajectories(advantages, turn_ids)
