"""The rule that follows the KL, and what it does to the learning rates of every kind of schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DeepSpeedSchedulerWrapper
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from sorl_trl.learning_rate import scale_learning_rate
from sorl_trl.ops import kl_controlled_factor
from sorl_trl.trainers.kl_control import KLControl
from sorl_trl.trainers.metrics import mean_kl

TARGET = 0.1
SCHEDULERS: dict[str, Any] = {
    "closed form": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10),
    "none of its own": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "recursive": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=12),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))],
        milestones=[5],
    ),
}


def policy_and_critic() -> torch.optim.Optimizer:
    groups = [{"lr": 1.0}, {"lr": 0.3, "critic": True}, {"lr": 1.0, "weight_decay": 0.0}]
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], **group} for group in groups])


def kl_schedule() -> KLControl:
    return KLControl(TARGET, lambda factor: None)


class Run:
    """Updates with given KLs, without a model."""

    def __init__(self, scheduler: str = "closed form", *, controlled: bool = True) -> None:
        self.optimizer = policy_and_critic()
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.schedule = kl_schedule() if controlled else None
        self.begin()

    def begin(self) -> None:
        if self.schedule is not None:
            begin(self.schedule, self.optimizer, self.scheduler)

    def update(self, *kl: float) -> tuple[float, list[float]]:
        """With one KL per micro-batch: the factor, and the rates with which the optimizer steps."""
        factor = 1.0
        if self.schedule is not None:
            factor = self.schedule.adjust(mean_kl([({"kl_to_old": each}, True) for each in kl], has_moved=True))
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.step()
        self.scheduler.step(*[1.0] * isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau))
        return factor, rates

    def factors(self, kls: Iterable[float]) -> list[float]:
        return [self.update(kl)[0] for kl in kls]


def begin(schedule: KLControl, optimizer: Any, scheduler: Any) -> None:
    nothing: Any = SimpleNamespace()
    schedule.on_train_begin(nothing, nothing, nothing, optimizer=optimizer, lr_scheduler=scheduler)


@pytest.mark.parametrize("scheduler", ["closed form", "recursive", "sequence"])
def test_without_a_target_a_resumed_run_is_as_scheduled(scheduler: str) -> None:
    run, plain = Run(scheduler), Run(scheduler, controlled=False)
    for _ in range(3):
        run.update(1.0)
        plain.update()
    begin(KLControl(0.0, lambda factor: None), run.optimizer, run.scheduler)
    run.schedule = None
    for _ in range(3):
        assert run.update()[1] == pytest.approx(plain.update()[1])


class TestRule:
    def test_a_sequence_worked_by_hand(self) -> None:
        """Target 0.1: down above 0.2, up below 0.05, and 0 says nothing."""
        kls = [0.0, 0.3, 0.5, 0.1, 0.2, 0.05, 0.04, 0.0, 0.01, 0.01, 9.0]
        expected = [1, 2 / 3, 4 / 9, 4 / 9, 4 / 9, 4 / 9, 2 / 3, 2 / 3, 1, 1, 2 / 3]
        assert Run().factors(kls) == pytest.approx(expected)

    def test_stops_at_a_hundredth(self) -> None:
        factors = Run().factors([1.0] * 15)
        assert factors[10] == pytest.approx(1.5**-11)
        assert factors[11:] == [0.01] * 4
        assert kl_controlled_factor(0.01, 0.01, TARGET) == pytest.approx(0.015)

    @given(
        factor=st.floats(0.01, 1.0),
        kl=st.one_of(st.floats(0.0, allow_infinity=True), st.just(math.nan)),
        target=st.floats(1e-6, 10.0),
    )
    def test_bounds_and_direction(self, factor: float, kl: float, target: float) -> None:
        result = kl_controlled_factor(factor, kl, target)
        assert 0.01 <= result <= 1.0
        assert (result < factor) == (kl > 2 * target and factor > 0.01)
        assert (result > factor) == (0 < kl < target / 2 and factor < 1.0)


class TestMicroBatches:
    def test_their_mean_counts(self) -> None:
        run = Run()
        assert run.update(0.1, 0.29)[0] == 1.0
        assert run.update(0.1, 0.31)[0] == pytest.approx(2 / 3)

    def test_those_without_a_token_do_not_count(self) -> None:
        run = Run()
        assert run.update(math.nan, 0.3)[0] == pytest.approx(2 / 3)
        assert run.update(math.nan)[0] == pytest.approx(2 / 3)
        assert run.update()[0] == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", SCHEDULERS)
class TestSchedules:
    KLS = (0.0, 0.3, 0.3, 0.1, 0.01, 0.01, 0.01, 0.3)

    def test_the_policys_rate_is_scaled_and_the_critics_is_not(self, name: str) -> None:
        run, free = Run(name), Run(name, controlled=False)
        for kl in self.KLS:
            (factor, rates), (_, scheduled) = run.update(kl), free.update(kl)
            expected = [scheduled[0] * factor, scheduled[1], scheduled[2] * factor]
            assert rates == pytest.approx(expected)
        assert factor < 1

    def test_the_ceiling_is_the_rate_that_something_else_has_lowered(self, name: str) -> None:
        run, free = Run(name), Run(name, controlled=False)
        for step, kl in enumerate(self.KLS[:-1]):
            if step == 2:
                scale_learning_rate(run.optimizer, run.scheduler, 0.1)
            (_, rates), (_, scheduled) = run.update(kl), free.update(kl)
        assert rates == pytest.approx([0.1 * rate for rate in scheduled])

    def test_another_process_goes_on_where_it_stopped(self, name: str) -> None:
        run, resumed = Run(name), Run(name)
        for kl in self.KLS[:3]:
            run.update(kl)
        resumed.optimizer.load_state_dict(run.optimizer.state_dict())
        resumed.scheduler.load_state_dict(run.scheduler.state_dict())
        resumed.begin()
        assert [resumed.update(kl) for kl in self.KLS[3:]] == [run.update(kl) for kl in self.KLS[3:]]


@pytest.mark.parametrize(
    "scheduler",
    [
        lr_scheduler.OneCycleLR(policy_and_critic(), max_lr=1.0, total_steps=10),
        lr_scheduler.CyclicLR(policy_and_critic(), base_lr=0.1, max_lr=1.0),
        DeepSpeedSchedulerWrapper(None, None),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_a_schedule_that_cannot_be_scaled_is_refused(scheduler: Any) -> None:
    with pytest.raises(ValueError, match=rf"`lr_scheduler` is a {type(scheduler).__name__}.*cannot be lowered"):
        begin(kl_schedule(), policy_and_critic(), scheduler)
