"""Going back to a checkpoint in the middle of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from peft import PeftModel
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from sorl_trl.trainers.cycle.generation_cycle import GenerationCycle
from sorl_trl.trainers.cycle.resume_point import damage


def roll_back(trainer: Any, cycle: GenerationCycle, checkpoint: str | Path) -> None:
    """Restore what a resumed run would: policy, critic, optimizer, schedule and gradient scaler.

    The step, the epoch, the order of prompts and the random numbers go on as they are, and the next step collects new
    trajectories. Between two optimizer steps, on all ranks together.

    Args:
        trainer: a `GRPOTrainer`.
        cycle: its generation cycle.
        checkpoint: the folder of one of its checkpoints.

    Raises:
        ValueError: `checkpoint` is not a whole checkpoint, or, with `save_only_model`, has no optimizer.
    """
    folder = Path(checkpoint)
    trainer.accelerator.wait_for_everyone()  # one rank writes for all
    problems = gather_object([damage(folder)])
    if without := [rank for rank, problem in enumerate(problems) if problem]:
        first = problems[without[0]]
        raise ValueError(f"`checkpoint` is {folder}, which processes {without} cannot go back to: {first}.")
    if trainer.is_deepspeed_enabled:
        is_peft = isinstance(trainer.model, PeftModel)
        deepspeed_load_checkpoint(trainer.model_wrapped, str(folder), load_module_strict=not is_peft)  # type: ignore[no-untyped-call]
    else:
        trainer._load_from_checkpoint(str(folder))
    trainer._load_optimizer_and_scheduler(str(folder))
    trainer._load_scaler(str(folder))
    cycle.discard()
    # transformers empties its sum of losses by subtracting it from itself, which leaves NaN at NaN.
    if not trainer._tr_loss.isfinite():
        trainer._tr_loss.zero_()
