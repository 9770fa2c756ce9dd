"""Whether all processes of a run see the same checkpoints."""

from __future__ import annotations

from pathlib import Path

from accelerate.utils import gather_object
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint


def ranks_where(holds: bool) -> list[int]:
    """The processes that say True here. All of them must ask together."""
    return [rank for rank, each in enumerate(gather_object([holds])) if each]


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
