"""Going back to a checkpoint in the middle of a run."""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from transformers.trainer import TRAINER_STATE_NAME
from trl import GRPOTrainer

from sorl_trl.trainers.cycle.shared_storage import ranks_where
from sorl_trl.trainers.cycle.stale_rollouts import StaleRollouts


class RollBack(StaleRollouts):
    """`GRPOTrainer` that can take the state of one of its checkpoints and train on from there."""

    def roll_back(self, checkpoint: str | Path) -> None:
        """Restore what a resumed run would: policy, critic, optimizer, schedule and gradient scaler.

        The step, the epoch, the order of prompts and the random numbers go on as they are, and the next step collects
        new trajectories. Between two optimizer steps, on all ranks together.

        Raises:
            ValueError: `checkpoint` is not a whole checkpoint, or, with `save_only_model`, has no optimizer.
        """
        folder = Path(checkpoint)
        self.accelerator.wait_for_everyone()  # one rank writes for all
        if self.args.save_only_model:
            raise ValueError(
                "`save_only_model` is True, so that checkpoints hold no optimizer to go back to: set it to False."
            )
        if without := ranks_where(not (folder / TRAINER_STATE_NAME).is_file()):  # transformers writes it last
            raise ValueError(
                f"`checkpoint` is {folder}, but must be a folder with a {TRAINER_STATE_NAME}: processes {without} see "
                "none."
            )
        if self.is_deepspeed_enabled:
            is_peft = isinstance(self.model, PeftModel)
            deepspeed_load_checkpoint(self.model_wrapped, str(folder), load_module_strict=not is_peft)  # type: ignore[no-untyped-call]
        else:
            self._load_from_checkpoint(str(folder))
        # TRL's own: what ours adds goes on with the checkpoint's trajectories and its place among the prompts.
        GRPOTrainer._load_optimizer_and_scheduler(self, str(folder))
        self._load_scaler(str(folder))
        self.discard_rollouts()
        # transformers empties its sum of losses by subtracting it from itself, which leaves NaN at NaN.
        if not self._tr_loss.isfinite():
            self._tr_loss.zero_()
