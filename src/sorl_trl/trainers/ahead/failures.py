"""Makes a failure on one process fail all, and leaves a checkpoint if the engine is gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from sorl_trl.trainers.agents.vllm.connection import EngineUnavailable
from sorl_trl.trainers.cycle.epoch_sampler import cycle_steps
from sorl_trl.trainers.cycle.resume_point import damage, ranks_where


def together(trainer: Any, function: Callable[..., None], *args: Any) -> None:
    """Call a function on all processes, and raise an error on all if any of them raises one.

    If the only failure is that the engine is gone, a checkpoint is written before EngineUnavailable is raised. Call
    this before any work of the next rollout.
    """
    error: Exception | None = None
    try:
        function(*args)
    except Exception as raised:
        error = raised
    mine = None if error is None else (isinstance(error, EngineUnavailable), str(error) or repr(error))
    said = [each for each in gather_object([mine]) if each is not None]
    if said and all(is_gone for is_gone, _ in said):
        raise EngineUnavailable(f"{said[0][1]}. {_checkpointed(trainer)}") from error
    if error is not None:
        raise error
    if said:
        raise RuntimeError(f"another process failed: {said[0][1]}")


def _checkpointed(trainer: Any) -> str:
    """Ensure that the last optimizer step has a checkpoint; return a sentence that says where to resume from."""
    args, step = trainer.args, trainer.state.global_step
    folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
    # If an optimizer step takes several rollouts, it may be half done, which no checkpoint can hold.
    is_between = cycle_steps(trainer) % args.gradient_accumulation_steps == 0
    if step and is_between and args.save_strategy != SaveStrategy.NO and not args.save_only_model:
        if not ranks_where(damage(folder) is None):
            trainer._save_checkpoint(trainer.model_wrapped, None)
            trainer.callback_handler.on_save(args, trainer.state, trainer.control)
            trainer.accelerator.wait_for_everyone()  # once one fails, the launcher ends all, even while they write
        return f"Resume from {folder}."
    return "Resume from the last checkpoint, where there is one."
