"""From rewards and values to advantages, returns and metrics: worked by hand, and blind to what is masked."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sorl_trl.methods import GAE, Experience
from sorl_trl.ops import turn_layout, turn_rewards_to_tokens
from sorl_trl.trainers.so_ppo_trainer import critic_metrics

NAN = float("nan")


class TestHandWorked:
    """Turn 0 has two tokens, an observation follows, turn 1 has one token; the second trajectory has one turn."""

    turn_ids = torch.tensor([[0, 0, -1, 1], [-1, 0, 0, -1]])
    values = torch.tensor([[1.0, 2.0, 9.0, 3.0], [9.0, 0.5, 0.25, 9.0]])
    turn_rewards = torch.tensor([[0.5, 4.0], [1.0, 0.0]])

    def experience(self, level: str) -> Experience:
        rewards = turn_rewards_to_tokens(self.turn_rewards, self.turn_ids)
        return GAE(level, lam=0.5)(rewards, self.values, self.turn_ids, gamma=0.5)

    def test_turns(self) -> None:
        """δ_0 = 0.5 + 0.5 · 3 − 1 = 1 and δ_1 = 4 − 3 = 1; Â_0 = 1 + 0.5 · 0.5 · 1; the second: 1 − 0.5."""
        experience = self.experience("turn")
        assert experience.values.tolist() == [[1.0, 3.0], [0.5, 0.0]]
        assert experience.advantages.tolist() == [[1.25, 1.0], [0.5, 0.0]]
        assert experience.returns.tolist() == [[2.25, 4.0], [1.0, 0.0]]
        assert experience.rewards_to_go.tolist() == [[2.5, 4.0], [1.0, 0.0]]
        assert experience.mask.tolist() == [[True, True], [True, False]]


# ---------------------------------------------------------------------------------------------------------------------
# Metrics
# ---------------------------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0] * 4]).bool()
VALUES = torch.tensor([[0.0, 2.0, 5.0, NAN], [2.0, NAN, 5.0, 1.0], [NAN] * 4])
RETURNS = torch.tensor([[0.0, 3.0, 1.0, NAN], [3.0, NAN, 1.0, 5.0], [NAN] * 4])
ADVANTAGES = torch.tensor([[1.0, 2.0, -1.0, NAN], [3.0, NAN, 1.0, 0.0], [NAN] * 4])


def describe(
    values: Tensor = VALUES, returns: Tensor = RETURNS, advantages: Tensor = ADVANTAGES, mask: Tensor = MASK
) -> dict[str, float]:
    """With targets that nothing may read."""
    targets = torch.full_like(returns, NAN)
    return critic_metrics(Experience(turn_layout(MASK.long() - 1), values, advantages, targets, returns, mask))


@pytest.mark.filterwarnings("error")
class TestCriticMetrics:
    def test_overall_by_hand(self) -> None:
        metrics = describe()
        # Returns 0, 3, 1, 3, 1, 5; residuals 0, 1, -4, 1, -4, 4: mean squares less squared means.
        spread, error = 45 / 6 - (13 / 6) ** 2, 50 / 6 - (2 / 6) ** 2
        assert metrics["critic/explained_variance"] == pytest.approx(1 - error / spread)
        assert metrics["critic/value_mean"] == pytest.approx(15 / 6)
        assert metrics["critic/return_mean"] == pytest.approx(13 / 6)
        assert metrics["advantages/mean"] == 1.0
        assert metrics["advantages/std"] == pytest.approx(math.sqrt(10 / 5))

    @pytest.mark.parametrize("shape", [(3, 4), (3, 0), (0, 4)])
    def test_no_unit(self, shape: tuple[int, int]) -> None:
        metrics = describe(*(torch.full(shape, NAN),) * 3, torch.zeros(shape).bool())
        assert len(metrics) == 5
        assert all(math.isnan(value) for value in metrics.values())
