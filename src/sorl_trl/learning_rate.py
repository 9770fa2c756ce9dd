"""Changes learning rates in the middle of a run, for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR


def check_scheduler(scheduler: Any) -> None:
    """Raise ValueError unless the learning rates of `scheduler` can be lowered for good."""
    lowerable = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, OneCycleLR | CyclicLR)
    if not lowerable:
        raise ValueError(
            f"`lr_scheduler` is a {type(scheduler).__name__}, whose learning rates cannot be lowered for good. Choose "
            "one of torch's by `lr_scheduler_type`, such as 'linear', and none in the DeepSpeed configuration, or set "
            "`target_kl=0`."
        )


def scale_learning_rate(
    optimizer: Any, scheduler: Any, factor: float, concerns: Callable[[dict[str, Any]], bool] = lambda group: True
) -> None:
    """Multiply the learning rates of the parameter groups that it `concerns` by `factor`, for the rest of the run.

    Optimizer and scheduler keep the new rates in their state, so they survive a resume.
    """
    factors = [factor if concerns(group) else 1.0 for group in optimizer.param_groups]
    for group, each in zip(optimizer.param_groups, factors, strict=True):
        group["lr"] *= each
    for part in (scheduler, *getattr(scheduler, "_schedulers", [])):  # SequentialLR has several
        for name in ("base_lrs", "_last_lr"):  # ReduceLROnPlateau has no base: it starts from the groups' rates
            if hasattr(part, name):
                rates = zip(getattr(part, name), factors, strict=True)
                setattr(part, name, [rate * each for rate, each in rates])
