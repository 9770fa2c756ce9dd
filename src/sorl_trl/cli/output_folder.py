"""The folder that a run writes into: a new one, or its own, because two runs never share one."""

from __future__ import annotations

from pathlib import Path

from accelerate.utils import broadcast_object_list

from sorl_trl.recipe.arguments import Arguments
from sorl_trl.records import RECIPE_FILE, checkpoints
from sorl_trl.records.resume_point import ADAPTERS, WEIGHTS, resume_point

SIGNS = (RECIPE_FILE, *WEIGHTS, *ADAPTERS)
"""A folder with one of these files holds a run or a policy."""


def check_output_folder(arguments: Arguments) -> None:
    """Find the checkpoint to resume from, and refuse a folder that another run has used. All ranks call it together.

    Raises:
        ValueError: On all ranks, if the checkpoint cannot be resumed from or the output folder is used.
    """
    config = arguments.config
    config.resume_from_checkpoint = resume_point(config, config.resume_from_checkpoint)
    # Other ranks may look at the folder later, when the main process has begun to write.
    mistakes = broadcast_object_list([_mistake(arguments) if config.process_index == 0 else None])
    if mistakes[0] is not None:
        raise ValueError(mistakes[0])


def _mistake(arguments: Arguments) -> str | None:
    folder = Path(str(arguments.config.output_dir))
    resumed = arguments.config.resume_from_checkpoint
    most = arguments.config.max_steps
    step = Path(resumed or "").name.rpartition("-")[2]
    if step.isdecimal() and 0 < most <= int(step):
        return f"{resumed} is at step {step}, and `max_steps` is {most}: raise it to go on"
    goes_on = resumed is not None and Path(resumed).resolve().parent == folder.resolve()
    if goes_on or not _is_used(folder):
        return None
    go_on = "`--resume_from_checkpoint latest` goes on with it, or " if checkpoints(folder) else ""
    return f"`output_dir` is {folder}, which holds a run: {go_on}remove it, or name another folder"


def _is_used(folder: Path) -> bool:
    return bool(checkpoints(folder)) or any((folder / name).is_file() for name in SIGNS)
