"""The folder that a run writes into: a new one, its own, or one that is cleared. Two runs never share one."""

from __future__ import annotations

import shutil
from pathlib import Path

from accelerate.utils import broadcast_object_list

from sorl_trl.evaluation.run_folder import TABLE
from sorl_trl.recipe.arguments import Arguments
from sorl_trl.records import EVALUATION_FOLDER, RECIPE_FILE, checkpoints
from sorl_trl.records.evaluated import FOLDER, RESULTS, SETTINGS
from sorl_trl.records.trained import SHARDS
from sorl_trl.trainers.cycle.resume_point import ADAPTERS, WEIGHTS, resume_point

SIGNS = (RECIPE_FILE, *WEIGHTS, *ADAPTERS)
"""With one of these files, a folder holds a run or a policy."""
OF_A_RUN = (
    *SIGNS,
    *("model-*.safetensors", "pytorch_model-*.bin", "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template.jinja"),
    *("training_args.bin", "trainer_state.json", "critic", SHARDS, "completions/completions_*.parquet"),
    *(f"{EVALUATION_FOLDER}/{name}" for name in (SETTINGS, FOLDER, RESULTS, TABLE)),
)
"""What a run leaves in its folder beside checkpoints, as patterns: not what a user may have put there."""


def check_output_folder(arguments: Arguments) -> None:
    """Find what to resume from, and refuse to write among what another run left. All ranks must ask together.

    Raises:
        ValueError: on all ranks: the checkpoint cannot be resumed from, or the output folder is used.
    """
    config = arguments.config
    config.resume_from_checkpoint = resume_point(config, config.resume_from_checkpoint)
    # Others may see the folder later, when the main process has begun to write.
    mistakes = broadcast_object_list([_mistake(arguments) if config.process_index == 0 else None])
    if mistakes[0] is not None:
        raise ValueError(mistakes[0])


def _mistake(arguments: Arguments) -> str | None:
    folder = Path(str(arguments.config.output_dir))
    resumed, model = arguments.config.resume_from_checkpoint, Path(str(arguments.model.model_name_or_path))
    most = arguments.config.max_steps
    step = Path(resumed or "").name.rpartition("-")[2]
    if step.isdecimal() and 0 < most <= int(step):
        return f"{resumed} is at step {step}, and `max_steps` is {most}: raise it to go on"
    goes_on = resumed is not None and Path(resumed).resolve().parent == folder.resolve()
    if arguments.trainer.overwrite_output_dir:
        is_inside = goes_on or (model.exists() and model.resolve().is_relative_to(folder.resolve()))
        said = f"`overwrite_output_dir` would remove what the run starts from, in {folder}: name another `output_dir`"
        return said if is_inside else None
    if goes_on or not _is_used(folder):
        return None
    go_on = "`--resume_from_checkpoint latest` goes on with it, " if checkpoints(folder) else ""
    return f"`output_dir` is {folder}, which holds a run: {go_on}`--overwrite_output_dir` removes it first"


def _is_used(folder: Path) -> bool:
    return bool(checkpoints(folder)) or any((folder / name).is_file() for name in SIGNS)


def clear_output_folder(folder: Path) -> None:
    """Remove the run that a folder holds, and nothing that is not a run's."""
    if not _is_used(folder):
        return
    for path in [*checkpoints(folder), *(path for pattern in OF_A_RUN for path in folder.glob(pattern))]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
