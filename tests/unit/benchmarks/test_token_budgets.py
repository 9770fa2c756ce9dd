"""What a benchmark says of methods at the same number of tokens, by hand."""

from __future__ import annotations

import math

import pytest
from benchmarks.token_budgets import Curve, budget_table, curve_of, difference_of


def rollout(turns: float, tokens: float, reward: float) -> dict[str, float]:
    return {"rollout/turns_per_trajectory": turns, "rollout/tokens_per_turn": tokens, "reward": reward}


def test_tokens_add_up_over_rollouts() -> None:
    log = [rollout(2.0, 3.0, 0.1), {"loss": 1.0}, rollout(1.5, 4.0, 0.2), {"loss": 0.5}, {"train_runtime": 3.0}]
    assert curve_of(log, 10) == Curve([60.0, 120.0], [0.1, 0.2])


def test_the_reward_at_a_budget_is_that_of_the_last_rollouts_within_it() -> None:
    curve = Curve([10.0 * n for n in range(1, 8)], [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert curve.reward_at(60.0) == pytest.approx((0.1 + 0.2 + 0.3 + 0.4 + 0.5) / 5)
    assert curve.reward_at(29.0) == pytest.approx(0.05)
    assert math.isnan(curve.reward_at(9.0))


def test_differences_are_paired() -> None:
    # 0.1, 0.2 and 0.3: standard deviation 0.1, and Student's t of two degrees of freedom.
    found = difference_of([0.5, 0.7, 0.9], [0.4, 0.5, 0.6])
    reach = 4.303 * 0.1 / math.sqrt(3)
    assert found.mean == pytest.approx(0.2)
    assert found.interval == pytest.approx((0.2 - reach, 0.2 + reach))
    assert math.isnan(difference_of([1.0], [0.0]).interval[0])


def test_budgets_are_shares_of_the_shortest_run() -> None:
    ours = [Curve([100.0, 400.0], [0.5, 0.7])]
    theirs = [Curve([100.0, 200.0, 300.0, 800.0], [0.1, 0.2, 0.3, 0.4])]
    table = budget_table({"ours": ours, "theirs": theirs}, "theirs")
    assert "| method | 100 tokens | 200 tokens | 300 tokens | 400 tokens |" in table
    assert "| theirs | 0.100 | 0.150 | 0.200 | 0.200 |" in table
    assert "| ours | 0.500 (+0.400" in table and "0.600 (+0.400" in table
