from __future__ import annotations

import torch

from sorl_trl.experimental.group_refill import merged_rollout
from sorl_trl.ops import turn_layout
from tests.unit.methods.test_pieces import rollout


def test_the_longest_trajectory_may_be_replaced() -> None:
    """What has a column per turn is as wide as the turns that are left."""
    longer = rollout(
        turns=turn_layout(torch.tensor([[0, 1, 2], [0, -1, -1], [0, -1, -1], [0, -1, -1]])),
        turn_rewards=torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [5.0, 0.0, 0.0], [6.0, 0.0, 0.0]]),
        has_turn_reward=torch.ones(4, 3, dtype=torch.bool),
        states=torch.zeros(4, 3, dtype=torch.long),
    )
    shorter = rollout(
        turns=turn_layout(torch.tensor([[0, 0, 1]] * 4)),
        turn_rewards=torch.tensor([[7.0, 8.0]] * 4),
        has_turn_reward=torch.ones(4, 2, dtype=torch.bool),
        states=torch.zeros(4, 2, dtype=torch.long),
    )
    merged = merged_rollout(longer, shorter, torch.tensor([True, False, False, True]))
    assert merged.turn_rewards.tolist() == [[7.0, 8.0], [4.0, 0.0], [5.0, 0.0], [7.0, 8.0]]
    assert merged.returns.shape == merged.turn_mask.shape == merged.states.shape == (4, 2)
