"""Dr. MAS's credit: each agent's turns are compared with the turns of the same agent in the group."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
import torch
from torch import Tensor

from sorl_trl.methods import AgentWise, ScoredRollout
from sorl_trl.ops import turn_layout


def rollout(counts: list[int], outcomes: Tensor, group: int, scale: str = "group") -> ScoredRollout:
    """Trajectories of so many turns of one token, with outcomes alone; NaN where there is none."""
    turn_ids = torch.tensor([[k if k < count else -1 for k in range(max(counts))] for count in counts])
    turns, nothing = turn_layout(turn_ids), torch.zeros(turn_ids.shape, dtype=outcomes.dtype)
    states = torch.zeros_like(turn_ids)
    return ScoredRollout(
        turns, outcomes.unsqueeze(1), ["outcome"], torch.ones(1), nothing, nothing.bool(), outcomes.nan_to_num(),
        ~outcomes.isnan(), states, group, 1.0, scale,
    )  # fmt: skip


def test_two_agents_by_hand() -> None:
    """The first acts in turns 0 and 2, and has the returns 1, 1, 0 and 4; the second has 1 and 0."""
    found = AgentWise()(rollout([3, 2, 1], torch.tensor([1.0, 0.0, 4.0]), 3, "none"))
    torch.testing.assert_close(found, torch.tensor([[-0.5, 0.5, -0.5], [-1.5, -0.5, 0.0], [2.5, 0.0, 0.0]]))


@pytest.mark.parametrize("agents", [1, 2, 3])
def test_equals_loops(agents: int) -> None:
    """Two groups of four, in float64. One trajectory has no reward; of three agents, one acts once in its group."""
    counts, group, unscored = [3, 1, 4, 2, 2, 2, 3, 1], 4, 3
    outcomes = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outcomes[unscored] = math.nan
    turns = [(i, k) for i, count in enumerate(counts) for k in range(count) if i != unscored]
    expected = torch.zeros(8, 4, dtype=torch.float64)
    for i, k in turns:
        own = [float(outcomes[j]) for j, turn in turns if j // group == i // group and (turn - k) % agents == 0]
        expected[i, k] = (float(outcomes[i]) - fmean(own)) / (stdev(own) + 1e-4) if len(own) > 1 else 0.0
    torch.testing.assert_close(AgentWise(agents)(rollout(counts, outcomes, group)), expected, rtol=1e-9, atol=1e-9)


def test_the_number_of_agents_is_checked() -> None:
    with pytest.raises(ValueError, match="`agents` is 0, but must be a whole number, at least 1"):
        AgentWise(0)
