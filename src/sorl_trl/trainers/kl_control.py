"""A learning rate that keeps the KL to the old policy near a target. Our addition, not part of SORL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback

from sorl_trl.learning_rate import check_scheduler, scale_learning_rate
from sorl_trl.methods import MicroBatch
from sorl_trl.ops import kl_controlled_factor
from sorl_trl.trainers.metrics import mean_kl

FACTOR = "policy_lr_factor"
"""The scheduler's attribute that holds the factor."""


class KLControl(TrainerCallback):
    """Multiplies the policy's learning rate, but not the critic's, by a factor that follows the KL.

    It acts before the backward pass of an update's last micro-batch, in which DeepSpeed steps the optimizer. The
    factor is part of the scheduler's state and of its base rates. It therefore survives a resume, and if something
    else lowers the learning rates, the lowered rates are scheduled from then on.

    `target_kl` is in nats per token; 0 leaves the schedule alone, even when a run that had lowered the rate is
    resumed. `record` is called with the factor of each update.

    Raises:
        ValueError: When training begins, if the learning rates of the schedule cannot be lowered.
    """

    def __init__(self, target_kl: float, record: Callable[[float], object]) -> None:
        self.target_kl, self._record = target_kl, record
        self._optimizer: Any = None
        self._scheduler: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizer, self._scheduler = kwargs["optimizer"], kwargs["lr_scheduler"]
        factor = getattr(self._scheduler, FACTOR, 1.0)  # part of its state, which every checkpoint has
        if self.target_kl:
            check_scheduler(self._scheduler)
            setattr(self._scheduler, FACTOR, factor)
        elif factor != 1:
            self._scale(factor, 1.0)

    def observe(self, batch: MicroBatch, metrics: Sequence[tuple[Mapping[str, float], bool]]) -> None:
        """Set the learning rate if the optimizer steps after a micro-batch. `metrics` are what `MetricLog` returns."""
        if batch.is_training and batch.ends_step and self.target_kl:
            self._record(self.adjust(mean_kl(metrics, has_moved=True)))

    def adjust(self, kl: float) -> float:
        """Set the policy's learning rate for an update that measures `kl`, and return the factor."""
        if self._scheduler is None:  # the loss is computed outside of training
            return 1.0
        before: float = getattr(self._scheduler, FACTOR)
        factor = kl_controlled_factor(before, kl, self.target_kl)
        if factor != before:
            self._scale(before, factor)
        return factor

    def _scale(self, before: float, factor: float) -> None:
        scale_learning_rate(self._optimizer, self._scheduler, factor / before, lambda group: not group.get("critic"))
        setattr(self._scheduler, FACTOR, factor)
