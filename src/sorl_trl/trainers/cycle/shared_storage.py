"""Whether the machines of a run write and read the same checkpoints."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

logger = get_logger(__name__)


def ranks_where(holds: bool) -> list[int]:
    """The processes that say True here. All of them must ask together."""
    return [rank for rank, each in enumerate(gather_object([holds])) if each]


def check_storage(args: TrainingArguments) -> None:
    """Warn where machines do not share the output folder, so that checkpoints would lie on them in pieces.

    Raises:
        ValueError: `save_on_each_node` is set. On storage that is shared, each machine would write the same files;
            else transformers leaves the model's weights to process 0, and DeepSpeed its list of checkpoints.
    """
    machines = len(ranks_where(args.local_process_index == 0))
    if machines == 1 or args.save_strategy == "no":
        return
    if args.save_on_each_node:
        raise ValueError(
            f"`save_on_each_node` is True on {machines} machines, but must be False: what each would save alone "
            "cannot be resumed. Use an `output_dir` that all machines share."
        )
    if elsewhere := _ranks_elsewhere(Path(str(args.output_dir)), args.process_index == 0):
        logger.warning(
            f"Processes {elsewhere} do not see the `output_dir={args.output_dir}` of process 0: each checkpoint will "
            "lie on the machines in pieces. No run can be rolled back to them, and none resumed before the pieces "
            "are copied together on every machine. Use an `output_dir` that all machines share."
        )


def _ranks_elsewhere(folder: Path, is_main: bool) -> list[int]:
    """The processes that do not see what the main process writes into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    name: list[Any] = broadcast_object_list([f".seen-by-all-{uuid.uuid4().hex}"])
    probe = folder / name[0]
    if is_main:
        probe.touch()
    ranks_where(is_main)  # nobody looks before it is there
    elsewhere = ranks_where(not probe.exists())
    if is_main:
        probe.unlink()
    return elsewhere


def check_resumable(args: TrainingArguments, checkpoint: str | bool | None) -> None:
    """Raise ValueError on all ranks where some see another `checkpoint` than others, or none.

    Args:
        args: of the trainer.
        checkpoint: as `Trainer.train` takes it: a folder, True for the newest in the output folder, else none.
    """
    if not checkpoint:
        return
    folder = get_last_checkpoint(str(args.output_dir)) if checkpoint is True else checkpoint  # type: ignore[no-untyped-call]
    is_whole = folder is not None and (Path(folder) / TRAINER_STATE_NAME).is_file()
    seen = gather_object([Path(str(folder)).name if is_whole else None])
    if len(set(seen)) > 1:
        found = ", ".join(f"{name or 'none'} on process {rank}" for rank, name in enumerate(seen))
        raise ValueError(
            f"`resume_from_checkpoint` is {checkpoint!r}, but not all processes see the same whole checkpoint: "
            f"{found}. Use storage that all machines share, or copy the pieces of each together on every machine."
        )
