"""What the benchmark of rounding compares."""

from __future__ import annotations

import torch
from benchmarks.ratio_rounding import build_policy, moved, outside, score


def test_the_policy_is_left_as_it_was() -> None:
    policy, ids = build_policy(8), torch.arange(1, 34).reshape(1, 33)
    before = score(policy, ids, halves=False)
    exact, rounded = moved(policy, ids, 1e-5)
    assert torch.equal(score(policy, ids, halves=False), before)
    assert exact.shape == rounded.shape == (1, 32)
    assert 0 < exact.abs().max() < (rounded - exact).abs().max()


def test_a_step_of_nothing_moves_nothing_in_either_precision() -> None:
    exact, rounded = moved(build_policy(8), torch.arange(1, 34).reshape(1, 33), 0.0)
    assert exact.abs().max() == rounded.abs().max() == 0


def test_outside() -> None:
    assert outside(torch.tensor([0.0, 0.03, -0.03, 0.001]), 10) == 0.5
