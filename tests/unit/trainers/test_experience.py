"""The metrics of advantages, values and returns: worked by hand, and blind to what is masked."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sorl_trl.methods import Experience
from sorl_trl.ops import turn_layout
from sorl_trl.trainers.so_ppo_trainer import critic_metrics

NAN = float("nan")


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
