"""What the benchmark's candidates compute."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from benchmarks.candidates import COEF_RANGE, RolloutSchedule, following, planned_factor
from torch import nn
from torch.optim import SGD, lr_scheduler


@pytest.mark.parametrize(
    ("coef", "kl", "expected"),
    [
        (1.0, 0.021, 1.5),
        (1.0, 0.019, 1.0),
        (1.0, 0.006, 1.0),
        (1.5, 0.004, 1.0),
        (1.0, 0.0, 1.0),
        (COEF_RANGE[1], 1.0, COEF_RANGE[1]),
        (COEF_RANGE[0], 1e-6, COEF_RANGE[0]),
    ],
)
def test_the_coefficient_follows_the_kl(coef: float, kl: float, expected: float) -> None:
    assert following(coef, kl, target=0.01) == pytest.approx(expected)


def test_the_planned_factor_is_of_a_kl_that_grows_with_its_square() -> None:
    assert planned_factor([(1.0, 0.04)], 0.01) == pytest.approx(0.5)
    assert planned_factor([(0.3, 3 * 0.3**2), (0.6, 3 * 0.6**2)], 3 * 0.2**2) == pytest.approx(0.2)


def test_a_schedule_of_rollouts_plans_at_their_beginning_and_brakes_within() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = RolloutSchedule(0.01, 3, Accelerator(cpu=True), lambda factor: None)
    nothing: Any = SimpleNamespace()
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    schedule.on_train_begin(nothing, nothing, nothing, optimizer=optimizer, lr_scheduler=scheduler)

    def factor(age: int, kl: float) -> float:
        schedule._age = age
        return schedule.adjust(kl)

    first = [factor(0, math.nan), factor(1, 0.03), factor(2, 0.05)]
    assert first == pytest.approx([1, 1, 2 / 3])  # 0.05 is above four times the target
    assert factor(0, math.nan) == pytest.approx(math.sqrt(0.01 * 2 / 0.08))
    calm = [factor(1, 1e-4), factor(2, 1e-4), factor(0, math.nan)]
    assert calm == pytest.approx([0.5, 0.5, 0.75])  # by half of itself at most
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.75)
    schedule.on_train_begin(nothing, nothing, nothing, optimizer=optimizer, lr_scheduler=scheduler)
    assert factor(1, 0.005) == pytest.approx(0.75)  # a run that goes on knows nothing of its last rollout
