"""The settings of a run, kept in its checkpoints. A resumed run says what differs and what has no effect."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from sorl_trl.command_line import UserMistake
from sorl_trl.files import write_whole
from sorl_trl.rollout import RolloutLimits
from sorl_trl.shipped import package_version
from sorl_trl.trainers.agents.agent_rollout import AgentRollout
from sorl_trl.trainers.checks import say_once

SETTINGS_FILE = "run_settings.json"
RESTORED = (
    "learning_rate",
    "critic_learning_rate",
    "value_head_learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
"""Options that are part of the state of optimizer and scheduler. A resumed run keeps the checkpoint's values."""
OF_TRANSFORMERS = (
    *("optim", "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_grad_norm"),
    *("max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("seed", "data_seed", "bf16", "fp16"),
)
"""The options of transformers that are compared. Of TRL's and ours, all but `NOT_COMPARED` are."""
ONE_STATE = {"adamw_torch", "adamw_torch_fused"}
"""Optimizers that can read each other's state."""
NOT_COMPARED = ("log_", "model_init_kwargs", "num_completions_to_print", "save_", "vllm_group", "vllm_server")


def settings_of(trainer: Any) -> dict[str, Any]:
    """The options of a trainer and of its rollout as JSON values, and the version of this package."""
    args = trainer.args
    general = {field.name for field in fields(TrainingArguments)} - {*RESTORED, *OF_TRANSFORMERS}
    names = [field.name for field in fields(args) if field.name not in general]
    found: dict[str, Any] = {name: getattr(args, name) for name in names if not name.startswith(NOT_COMPARED)}
    found |= {"trainer": type(trainer).__name__, "method": trainer.method.describe()}
    rollout = inspect.unwrap(trainer.rollout_func) if trainer.rollout_func else None
    if isinstance(rollout, AgentRollout):
        parts = {"limits": rollout.limits or RolloutLimits(), "engine": rollout.engine, "protocol": rollout.protocol}
        found |= {f"{kind}.{name}": value for kind, part in parts.items() for name, value in asdict(part).items()}
    found["sorl_trl"] = package_version()
    as_json: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return as_json


def save_settings(trainer: Any, checkpoint: Path) -> None:
    """Write the trainer's settings into a checkpoint, whose folder is made if it is missing."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_whole(checkpoint / SETTINGS_FILE, (json.dumps(settings_of(trainer), indent=2) + "\n").encode())


def take_up_settings(trainer: Any, checkpoint: Path) -> None:
    """Log which settings differ from the checkpoint's, and set the options in `RESTORED` to the checkpoint's values.

    A checkpoint without settings, such as one of TRL's, changes nothing.

    Raises:
        UserMistake: The state of the checkpoint's optimizer is another optimizer's, or holds a critic, unlike this
            run's.
    """
    file = checkpoint / SETTINGS_FILE
    if not file.is_file():
        return
    before, now = json.loads(file.read_bytes()), settings_of(trainer)
    optim = before.get("optim", now["optim"])
    if optim != now["optim"] and not {optim, now["optim"]} <= ONE_STATE:
        raise UserMistake(
            f"`optim` is {now['optim']!r}, but {checkpoint} holds the state of {optim!r}. Resume with the same, or "
            "start a new run from the checkpoint's policy."
        )
    if "critic" in before and "critic" not in now:
        raise UserMistake(
            f"The trainer is a {now['trainer']}, but {checkpoint} is of a {before['trainer']}, whose optimizer "
            "holds a critic. Resume with the same, or start a new run from the checkpoint's policy."
        )
    for name in RESTORED:
        if name in before and name in now and before[name] != now[name]:
            say_once(
                trainer.args,
                f"`{name}` is {now[name]} here, but the checkpoint's {before[name]} goes on: it is part of the state "
                "of the optimizer. Another one takes a new run, which may start from the checkpoint's policy.",
            )
            setattr(trainer.args, name, before[name])
    made_with = before.pop("sorl_trl", "an unknown version")
    others = [name for name in before if name in now and before[name] != now[name] and name not in RESTORED]
    if others:
        listed = "; ".join(f"`{name}` was {before[name]!r}, is {now[name]!r}" for name in others)
        say_once(trainer.args, f"This run differs from {checkpoint}, which sorl-trl {made_with} wrote: {listed}.")
