"""DPPO's mask and KL, token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sorl_trl.methods import DPPO, ClipRange, MicroBatch
from sorl_trl.ops import turn_layout

RANGE = ClipRange(0.2, 0.2)


def batch_of(now: list[float], sampled: list[float], advantage: float) -> MicroBatch:
    """One trajectory of one turn, with these probabilities of its tokens."""
    logps = torch.tensor([now], dtype=torch.float64).log().requires_grad_()
    sampling = torch.tensor([sampled], dtype=torch.float64).log()
    given: dict[str, Any] = {"level": "token", "turn_ratio": "geometric", "token_range": RANGE, "turn_range": RANGE}
    return MicroBatch(
        logps, sampling, sampling, logps - sampling, turn_layout(torch.zeros(1, len(now), dtype=torch.long)),
        torch.tensor([[advantage]], dtype=torch.float64), clip_range=RANGE, **given,
    )  # fmt: skip


@pytest.mark.parametrize(("advantage", "stopped"), [(1.0, [False, False, True]), (-1.0, [True, False, False])])
def test_tokens_that_moved_along_the_advantage_are_left_out(advantage: float, stopped: list[bool]) -> None:
    now, sampled = [0.1, 0.5, 0.9], [0.4, 0.4, 0.5]  # moved by -.3, +.1 and +.4
    batch = batch_of(now, sampled, advantage)
    objective = DPPO()(batch)
    assert objective.stopped.tolist() == [stopped]
    ratios = [a / b for a, b in zip(now, sampled, strict=True)]
    kl = [1e-3 * math.log(ratio) ** 2 for ratio in ratios]
    expected = [(0.0 if out else ratio * advantage) - k for out, ratio, k in zip(stopped, ratios, kl, strict=True)]
    assert objective.value[0].tolist() == pytest.approx(expected)
    objective.value.sum().backward()
    gradient = [
        (0.0 if out else ratio * advantage) - 2e-3 * math.log(ratio)
        for out, ratio in zip(stopped, ratios, strict=True)
    ]
    assert batch.logps.grad[0].tolist() == pytest.approx(gradient)


def test_a_token_that_the_engine_could_not_score_is_compared_with_the_old_policy() -> None:
    batch = batch_of([0.5, 0.5], [0.4, 0.4], 1.0)
    batch.sampling_logps.data = torch.tensor([[math.nan, math.log(0.4)]], dtype=torch.float64)
    batch.old_logps.data = torch.full((1, 2), math.log(0.4), dtype=torch.float64)
    value = DPPO()(batch).value
    assert value[0, 0] == value[0, 1]
