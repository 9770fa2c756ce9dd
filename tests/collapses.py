"""Runs that are driven into collapse, with and without a guard, and what must be after a roll back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from sorl_trl.diagnostics import CollapseGuard, Level, collapse_guard
from sorl_trl.learning_rate import scale_learning_rate
from sorl_trl.search import BM25Index
from sorl_trl.trainers.base import TurnLevelTrainer
from tests.agents import build_agent

STEPS = 32
UPDATES = 4
"""Optimizer steps of an iteration."""
JUMP = 16
"""The steps after it have a learning rate that ruins the policy: those of iteration 4 are the first."""
ALARM = JUMP + UPDATES + 1
"""With this step's log entry, iteration 4 is complete."""
RATE = 0.02
RULES = (Level("high_kl", "kl_to_old", "lower the learning rate", threshold=0.2),)
ALWAYS = (Level("always", "entropy", "nothing is wrong", threshold=0.0, patience=3),)


class LearningRateJump(TrainerCallback):
    """What a mistake in a schedule, or a learning rate that is too high by far, does all at once."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == JUMP:
            scale_learning_rate(kwargs["optimizer"], kwargs["lr_scheduler"], 50.0)


class Remembers(TurnLevelTrainer):
    """Keeps what a roll back has left."""

    def roll_back(self, checkpoint: str | Path) -> None:
        super().roll_back(checkpoint)
        self.restored = {
            "checkpoint": Path(checkpoint),
            "model": copy.deepcopy(self.model.state_dict()),
            "trained": {name for name, parameter in self.model.named_parameters() if parameter.requires_grad},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "schedule": copy.deepcopy(self.lr_scheduler.state_dict()),
            "step": (self.state.global_step, self._step),
        }


class GRPOThatRemembers(Remembers, SOGRPOTrainer):
    pass


class PPOThatRemembers(Remembers, SOPPOTrainer):
    pass


def build(folder: Path, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> Any:
    fields: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "num_iterations": UPDATES,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "epsilon": 0.2,  # with the range of turns the policy survives the jump
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": UPDATES,
        "seed": 7,
    }
    if issubclass(trainer_class, TurnLevelTrainer):
        fields |= {"target_kl": 0.0, "method": "so_grpo_note"}  # under the defaults it does not collapse
    search = overrides.pop("search", None)
    callbacks = overrides.pop("callbacks", [LearningRateJump()])
    folder.mkdir(exist_ok=True)
    if search is None and (folder / "index").exists():
        search = BM25Index.load(folder / "index")
    trainer = build_agent(folder, search, trainer_class, **{**fields, **overrides})
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


def set_numbers(monkeypatch: pytest.MonkeyPatch, **numbers: float) -> None:
    """Of the guard, for runs of a few iterations."""
    for name, value in {"LR_FACTOR": 0.1, "COOLDOWN": 1, "MARGIN": 1, **numbers}.items():
        monkeypatch.setattr(collapse_guard, name, value)


def guarded(folder: Path, action: str, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> tuple[Any, Any]:
    rules = overrides.pop("rules", RULES)
    trainer = build(folder, trainer_class, **overrides)
    guard = CollapseGuard(action, trainer if action == "roll_back" else None, rules)
    trainer.add_callback(guard)
    return trainer, guard


def logged(trainer: Any, metric: str) -> dict[int, float]:
    return {log["step"]: log[metric] for log in trainer.state.log_history if metric in log}


def checkpoint(trainer: Any, step: int) -> Path:
    return Path(trainer.args.output_dir) / f"checkpoint-{step}"


def assert_same_as_saved(restored: dict[str, Any]) -> None:
    """Bit by bit: policy or adapter, critic, optimizer, schedule."""
    folder = restored["checkpoint"]
    files = [*folder.glob("*.safetensors"), *(folder / "critic").rglob("*.safetensors")]
    assert files
    ours = list(restored["model"].values())
    for file in files:
        for name, saved in load_file(file).items():
            assert any(tensor.shape == saved.shape and torch.equal(tensor, saved) for tensor in ours), (file, name)
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    assert state["state"].keys() == restored["optimizer"]["state"].keys()
    for index, saved in state["state"].items():
        for name, value in saved.items():
            assert torch.equal(torch.as_tensor(restored["optimizer"]["state"][index][name]), torch.as_tensor(value))
    assert state["param_groups"] == restored["optimizer"]["param_groups"]
    assert torch.load(folder / "scheduler.pt", weights_only=True) == restored["schedule"]
