"""Saves a trainer's generation cycle, one rollout and its updates, in checkpoints, and resumes within it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device

from sorl_trl.command_line import UserMistake
from sorl_trl.files import write_whole
from sorl_trl.trainers.ahead.training import load_ahead
from sorl_trl.trainers.checks import say_once
from sorl_trl.trainers.cycle.epoch_sampler import cycle_steps
from sorl_trl.trainers.cycle.resume_point import ranks_where
from sorl_trl.trainers.rollout import ON_HOST

_SETTINGS = (
    "world_size",
    "per_device_train_batch_size",
    "steps_per_generation",
    "num_iterations",
    "gradient_accumulation_steps",
)
"""The fields of the configuration that determine the steps of a generation cycle."""


def save_cycle(trainer: Any, folder: Path) -> None:
    """Write into a checkpoint this process's step within the cycle, and the trajectories still to be trained on.

    TRL saves neither, and would generate new trajectories at once.
    """
    is_unfinished = trainer._step % cycle_steps(trainer) != 0
    state = {
        "step": trainer._step,
        "buffered_inputs": trainer._buffered_inputs if is_unfinished else None,
        "ahead": None if trainer._ahead is None else trainer._ahead.state(),
        **{name: getattr(trainer.args, name) for name in _SETTINGS},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(_file(trainer, folder), lambda file: torch.save(state, file))


def load_cycle(trainer: Any, folder: Path) -> None:
    """Restore the step within the cycle and the trajectories that are still to be trained on.

    Three cases are not exact: an iterable dataset after its first pass, because transformers cannot tell how long a
    pass is; and, with a warning, processes whose random state is not in the checkpoint, and a reference that
    `sync_ref_model` has moved. Sums between two log entries are lost, as in
    transformers' own trainer.

    Raises:
        UserMistake: The checkpoint has trajectories still to be trained on, but was written by another number of
            processes or with other batch settings.
    """
    args, file = trainer.args, _file(trainer, folder)
    if args.sync_ref_model:
        say_once(
            args,
            "`sync_ref_model` moves the reference, which is in no checkpoint: the run goes on with the reference that "
            "a new run starts from.",
        )
    rng_state = "rng_state.pth" if args.world_size == 1 else f"rng_state_{args.process_index}.pth"
    if without := ranks_where(not (folder / rng_state).is_file()):
        say_once(
            args,
            f"{folder} holds no random state for processes {without} (another number of processes wrote it, or it was "
            "copied in part): they go on with other samples.",
        )
    if without := ranks_where(not file.is_file()):  # all ranks must collect in the same steps
        say_once(
            args,
            f"{folder} does not say to processes {without} where in a generation cycle it was written "
            "(`trl.GRPOTrainer` wrote it, or it was copied in part): the run goes on with new trajectories.",
        )
        return
    # Not straight to the device: accelerate puts several CPU processes on "cpu:0", which torch.load refuses.
    state = torch.load(file, map_location="cpu", weights_only=True)
    is_waited_for = load_ahead(trainer, state.get("ahead"))
    changed = [name for name in _SETTINGS if state[name] != getattr(args, name)]
    if changed and (is_waited_for or state["buffered_inputs"] is not None):
        raise UserMistake(
            f"`{changed[0]}` is {getattr(args, changed[0])}, but was {state[changed[0]]} when {folder} was written, "
            "with trajectories still to be trained on. Resume with the same, or start a new run."
        )
    if state["buffered_inputs"] is None:
        trainer._step = 0  # the next step begins a cycle, whose settings may differ
        return
    trainer._step = state["step"]
    trainer._buffered_inputs = send_to_device(state["buffered_inputs"], trainer.accelerator.device, skip_keys=ON_HOST)


def _file(trainer: Any, folder: Path) -> Path:
    return folder / f"generation_cycle_{trainer.args.process_index}.pt"
