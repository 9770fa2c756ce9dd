"""Going back to a checkpoint in the middle of a run, from a callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from transformers import TrainerCallback

from tests.collapses import GRPOThatRemembers, PPOThatRemembers, assert_same_as_saved, build, checkpoint, logged


class RollsBack(TrainerCallback):
    """As a user's own callback may do it."""

    def __init__(self, trainer: Any, at: int, to: int) -> None:
        self.trainer, self.at, self.to = trainer, at, to

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            self.trainer.roll_back(checkpoint(self.trainer, self.to))


@pytest.mark.parametrize("trainer_class", [GRPOThatRemembers, PPOThatRemembers])
def test_restores_adapters(tmp_path: Path, trainer_class: Any) -> None:
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = build(tmp_path, trainer_class, peft_config=lora, learning_rate=0.1, max_steps=9, callbacks=[])
    trainable = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    trainer.add_callback(RollsBack(trainer, at=6, to=4))
    trainer.train()
    assert trainer.restored["checkpoint"] == checkpoint(trainer, 4)
    assert trainer.restored["trained"] == trainable
    assert_same_as_saved(trainer.restored)
    # In the middle of a cycle: its rest has new trajectories, and the next one begins where it would have.
    assert list(logged(trainer, "reward")) == [1, 5, 7, 9]


def test_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    trainer = build(tmp_path, GRPOThatRemembers, max_steps=1)
    with pytest.raises(ValueError, match=r"`checkpoint` is .*/nowhere, .* trainer_state\.json is missing"):
        trainer.roll_back(tmp_path / "nowhere")
    trainer = build(tmp_path, GRPOThatRemembers, max_steps=1, save_steps=1, save_only_model=True, callbacks=[])
    trainer.train()
    with pytest.raises(ValueError, match=r"optimizer\.pt is missing"):
        trainer.roll_back(checkpoint(trainer, 1))
