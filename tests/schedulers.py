"""Learning rate schedules that are not a closed form of the step."""

from __future__ import annotations

from typing import Any

from torch.optim import lr_scheduler

OTHER_SCHEDULERS: dict[str, Any] = {
    "none of its own": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "recursive": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=12),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))],
        milestones=[5],
    ),
}
