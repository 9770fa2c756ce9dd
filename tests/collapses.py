"""Runs that are driven into collapse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sorl_trl import SOGRPOTrainer
from sorl_trl.trainers.optimizer_step import scale_policy_rate
from tests.agents import build_agent

STEPS = 32
UPDATES = 4
"""Optimizer steps of an iteration."""
JUMP = 16
"""The steps after it have a learning rate that ruins the policy: those of iteration 4 are the first."""


class LearningRateJump(TrainerCallback):
    """What a mistake in a schedule, or a learning rate that is too high by far, does all at once."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == JUMP:
            scale_policy_rate(kwargs["optimizer"], kwargs["lr_scheduler"], 50.0)


def build(folder: Path, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> Any:
    fields: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "num_iterations": UPDATES,
        "max_steps": STEPS,
        "learning_rate": 0.02,
        **{"epsilon": 0.2, "scale_clip_range": False},  # with the range of turns the policy survives the jump
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "seed": 7,
        **{
            "target_kl": 0.0,
            "method": {"terms": {"clip_penalty": {"coef": 3.0, "epsilon": None}}},
        },  # under the defaults it does not collapse
    }
    search = overrides.pop("search", None)
    callbacks = overrides.pop("callbacks", [LearningRateJump()])
    folder.mkdir(exist_ok=True)
    trainer = build_agent(folder, search, trainer_class, **{**fields, **overrides})
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


def logged(trainer: Any, metric: str) -> dict[int, float]:
    return {log["step"]: log[metric] for log in trainer.state.log_history if metric in log}
