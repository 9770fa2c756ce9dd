"""What in the arguments of a run leaves `CollapseGuard` without what it needs."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import TrainingArguments

from sorl_trl.checks import Problem


def roll_back_problems(args: TrainingArguments) -> Iterator[Problem]:
    """Why a run leaves no checkpoints that a guard can go back to."""
    if args.save_strategy == "no":
        what = "`save_strategy` is 'no', but a guard that is to roll back needs checkpoints: set it to 'steps'."
        yield Problem("save_strategy", what, "steps")
    if args.save_only_model:
        what = "`save_only_model` is True, but a guard that is to roll back needs the optimizer: set it to False."
        yield Problem("save_only_model", what, False)


def log_problems(args: TrainingArguments) -> Iterator[Problem]:
    """Why a guard sees nothing."""
    if args.logging_strategy == "no":
        what = "`logging_strategy` is 'no', but CollapseGuard reads log entries: set it to 'steps'."
        yield Problem("logging_strategy", what, "steps")


def late_log_problems(strategy: str, steps: float | None) -> Iterator[Problem]:
    """Why a guard sees too late what it should; `steps` may be a share of the run, as `logging_steps` may."""
    if strategy == "steps" and steps and steps != 1:
        what = f"`logging_steps` is {steps:g}, but CollapseGuard reads log entries: it learns of numbers that are not "
        what += "finite so late that the run may have died of them. Set `logging_steps=1`."
        yield Problem("logging_steps", what, 1)
