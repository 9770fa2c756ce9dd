"""What acts on an optimizer step: what clipping removed, clipping apart, and a rate that follows the KL."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedSchedulerWrapper
from torch import nn
from torch.optim import lr_scheduler

from sorl_trl.methods import Clip, MicroBatch, Objective, Ratio
from sorl_trl.ops import turn_layout
from sorl_trl.trainers.metrics import UpdateKL
from sorl_trl.trainers.optimizer_step import ClippingBiasNormalizer, KLControl, clip_apart

# ---------------------------------------------------------------------------------------------------------------------
# C(θ)
# ---------------------------------------------------------------------------------------------------------------------


def one() -> Accelerator:
    """Not at import: a test before this one may have reset accelerate's state."""
    return Accelerator(cpu=True)


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def test_hand_worked_over_two_micro_batches() -> None:
    """C is (1, 4) + (2, 0) = (3, 4), of norm 5; then it is forgotten."""
    weights = parameter(1.0, 1.0)
    normalizer = ClippingBiasNormalizer([weights])
    normalizer.add(weights[0] + 4 * weights[1])
    normalizer.add(2 * weights[0])
    assert weights.grad is None  # the second backward stays out of the optimizer's gradient
    weights.grad = torch.tensor([10.0, -5.0], dtype=torch.float64)
    assert normalizer.normalize(one()) == pytest.approx(5.0)
    assert weights.grad.tolist() == pytest.approx([2.0, -1.0])
    assert normalizer.normalize(one()) == 0.0
    normalizer.add(0.5 * weights[0])
    assert normalizer.normalize(one()) == pytest.approx(0.5)
    assert weights.grad.tolist() == pytest.approx([2.0, -1.0]), "a norm below 1 divides nothing"


def observed(weights: nn.Parameter, stopped: list[bool], engine: Any = None, **fields: Any) -> ClippingBiasNormalizer:
    """One of two micro-batches: two trajectories of two tokens and of one, of advantages 3 and -1."""
    turns = turn_layout(torch.tensor([[0, 0], [0, -1]]))
    log_ratio = torch.stack([weights[:2], weights[2:]])
    batch = MicroBatch(
        logps=log_ratio, old_logps=log_ratio, sampling_logps=log_ratio, log_ratio=log_ratio, turns=turns,
        advantages=torch.tensor([[3.0], [-1.0]], dtype=torch.float64), unit=Ratio("token"), clip=Clip(0.2),
        inputs={"importance_sampling_ratio": engine}, **fields,
    )  # fmt: skip
    normalizer = ClippingBiasNormalizer([weights])
    settings: Any = SimpleNamespace(micro_batches=2.0, weighs_engine=engine is not None)
    normalizer.observe(settings, batch, Objective(log_ratio, torch.tensor(stopped).view(2, 2)))
    return normalizer


def test_a_micro_batch_adds_what_clipping_removed() -> None:
    """mean_i (1/|y_i|) Σ_{t clipped} w_t Â_t, halved by its two micro-batches; the last position is no token.

    Engine weights multiply it as they do the loss, and dropped rows leave its mean.
    """
    weights = parameter(0.5, 0.1, -0.4, 9.0)
    (found,) = observed(weights, [True, False, True, True])._gradients or []
    w = weights.detach().exp()
    expected = torch.stack([w[0] * 3 / 2, w[1] * 0, -w[2], w[3] * 0]) / 2 / 2
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    engine = torch.tensor([[2.0, 1.0], [0.5, 1.0]])
    (found,) = observed(weights, [True, False, True, True], engine, row_scale=3.0)._gradients or []
    torch.testing.assert_close(found.double(), expected * engine.flatten() * 3, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", ["nothing is stopped", "evaluation", "no gradient"])
def test_nothing_is_added(how: str) -> None:
    """What evaluation leaves behind would enter the next training step."""
    weights = parameter(0.5, 0.1, -0.4, 0.0)
    with torch.set_grad_enabled(how != "no gradient"):
        stopped = [how != "nothing is stopped", False, False, True]
        assert observed(weights, stopped, is_training=how != "evaluation")._gradients is None


@pytest.mark.parametrize(
    ("max_norm", "policy", "critic"),
    [(1.0, [0.6, 0.8], [0.0, 1.0]), (6.0, [3.0, 4.0], [0.0, 6.0])],
)
def test_parts_are_clipped_apart(max_norm: float, policy: list[float], critic: list[float]) -> None:
    """Norms of 5 and 12 by hand; of both together it would be 13."""
    parameters = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    for each, gradient in zip(parameters, ([3.0, 4.0], [0.0, 12.0]), strict=True):
        each.grad = torch.tensor(gradient)
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    parts = [[parameters[0], frozen], [parameters[1]]]
    assert [float(norm) for norm in clip_apart(one(), parts, max_norm)] == [5.0, 12.0]
    for each, expected in zip(parameters, (policy, critic), strict=True):
        assert each.grad is not None and each.grad.tolist() == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# The learning rate
# ---------------------------------------------------------------------------------------------------------------------

TARGET = 0.1
WARM_UP: Any = {"warm-up": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: float(step >= 3))}
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


class Run:
    """Updates with given KLs, without a model."""

    def __init__(self, scheduler: str = "closed form", target: float | None = TARGET) -> None:
        self.optimizer = policy_and_critic()
        self.scheduler = (SCHEDULERS | WARM_UP)[scheduler](self.optimizer)
        self.control: KLControl | None = None
        if target is not None:
            self.begin(target)

    def begin(self, target: float = TARGET) -> None:
        self.control = KLControl(target, lambda factor: None)
        begin(self.control, self.optimizer, self.scheduler)

    def update(self, kl: float = math.nan, at_rest: float = math.nan) -> tuple[float, list[float]]:
        """The factor, and the rates with which the optimizer steps."""
        factor = 1.0
        if self.control is not None and self.control.target_kl:
            factor = self.control.adjust(UpdateKL(kl, at_rest))
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.step()
        self.scheduler.step(*[1.0] * isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau))
        return factor, rates

    def factors(self, kls: Iterable[float]) -> list[float]:
        return [self.update(kl)[0] for kl in kls]


def begin(control: KLControl, optimizer: Any, scheduler: Any) -> None:
    nothing: Any = SimpleNamespace()
    control.on_train_begin(nothing, nothing, nothing, optimizer=optimizer, lr_scheduler=scheduler)


def test_factors_worked_by_hand() -> None:
    """From a tenth, with a target of 0.1: up below 0.05, down above 0.2; 0 and NaN have no effect; it has two ends."""
    kls = [0.0, 0.01, 0.04, math.nan, 0.05, 0.2, 0.1, 0.3, 0.5, 0.0]
    expected = [0.1, 0.15, *[0.225] * 5, 0.15, 0.1, 0.1]
    assert Run().factors(kls) == pytest.approx(expected)
    assert Run().factors([0.01] * 7)[4:] == pytest.approx([0.759375, 1, 1])
    assert Run().factors([1.0] * 7)[4:] == pytest.approx([0.1 * 1.5**-5, 0.01, 0.01])


def test_what_is_measured_at_rest_is_no_movement() -> None:
    """0.25 is above twice the target, but 0.2 of it is noise."""
    run = Run()
    assert run.update(0.25)[0] == pytest.approx(0.1 / 1.5)
    assert run.update(at_rest=0.2)[0] == pytest.approx(0.1 / 1.5)
    assert run.factors([0.27, 0.24, 0.15]) == pytest.approx([0.1 / 1.5, 0.1, 0.15])
    run.update(at_rest=0.1)  # a tenth of the way from 0.2
    assert run.factors([0.385]) == pytest.approx([0.15])
    assert run.factors([0.395]) == pytest.approx([0.1])


def test_a_policy_that_is_held_back_does_not_raise_its_rate() -> None:
    """During the critic's warm-up, what seems to move is noise: the KL is never exactly that at rest."""
    run = Run("warm-up")
    run.update(at_rest=0.02)
    assert run.factors([0.021, 0.019, 1e-14, 0.03, 0.2]) == pytest.approx([0.1, 0.1, 0.15, 0.225, 0.225])


@pytest.mark.parametrize("name", SCHEDULERS)
class TestSchedules:
    KLS = (0.01, 0.3, 0.3, 0.1, 0.01, 0.01, 0.01, 0.3)

    def test_the_policys_rate_is_scaled_and_the_critics_is_not(self, name: str) -> None:
        run, free = Run(name), Run(name, target=None)
        for kl in self.KLS:
            (factor, rates), (_, scheduled) = run.update(kl), free.update(kl)
            assert rates == pytest.approx([scheduled[0] * factor, scheduled[1], scheduled[2] * factor])
        assert factor < 1

    def test_another_process_goes_on_where_it_stopped(self, name: str) -> None:
        """Or, without a target, as scheduled."""
        run, resumed = Run(name), Run(name)
        for kl in self.KLS[:3]:
            run.update(kl, at_rest=0.005)
        resumed.optimizer.load_state_dict(run.optimizer.state_dict())
        resumed.scheduler.load_state_dict(run.scheduler.state_dict())
        resumed.begin()
        assert [resumed.update(kl) for kl in self.KLS[3:]] == [run.update(kl) for kl in self.KLS[3:]]
        plain = Run(name, target=None)
        for _ in self.KLS:
            plain.update()
        if name != "none of its own":  # it goes on from the rates that it finds
            run.begin(target=0.0)
            assert run.update()[1] == pytest.approx(plain.update()[1])


@pytest.mark.parametrize(
    "scheduler",
    [lr_scheduler.OneCycleLR(policy_and_critic(), max_lr=1.0, total_steps=10), DeepSpeedSchedulerWrapper(None, None)],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_a_schedule_that_cannot_be_scaled_is_refused(scheduler: Any) -> None:
    with pytest.raises(ValueError, match="`lr_scheduler`"):
        begin(KLControl(TARGET, lambda factor: None), policy_and_critic(), scheduler)
