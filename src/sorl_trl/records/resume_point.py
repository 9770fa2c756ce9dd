"""Finds the checkpoint to resume from, and checks before loading that it is complete and the same on all ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from sorl_trl.records import checkpoints

NEWEST = ("latest", "true", "True")
WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_PARTS = (OPTIMIZER_NAME, SCHEDULER_NAME)
_NAME = re.compile(r"checkpoint-(\d+)")


def ranks_where(holds: bool) -> list[int]:
    """The ranks on which `holds` is True. All ranks must call it together."""
    return [rank for rank, each in enumerate(gather_object([holds])) if each]


def resume_point(args: TrainingArguments, checkpoint: str | Path | bool | None) -> str | None:
    """The folder of the checkpoint to resume from, or None for a new run. All ranks must call it together.

    Args:
        args: The trainer's arguments.
        checkpoint: A folder; or True, "true" or "latest" for the newest fully written checkpoint in the output folder.
            Anything false starts a new run.

    Raises:
        ValueError: On all ranks, if ranks see different checkpoints or some see none, or if a file is missing or
            damaged. The message names the file and the newest complete checkpoint.
    """
    if not checkpoint or checkpoint in ("false", "False"):
        return None
    output, folder = Path(str(args.output_dir)), Path(str(checkpoint))
    if checkpoint is True or checkpoint in NEWEST:
        folder = newest(output) or output
    problem = checkpoint_problem(folder) if folder != output else f"there is no checkpoint in {output}"
    seen = gather_object([None if problem else folder.name])
    if len(set(seen)) > 1:
        found = ", ".join(f"{name or 'none'} on process {rank}" for rank, name in enumerate(seen))
        raise ValueError(
            f"`resume_from_checkpoint` is {checkpoint!r}, but not all processes see the same complete checkpoint: "
            f"{found}. Use storage that all machines share, or copy the parts from all machines to each of them."
        )
    if problem:
        whole = newest_whole(folder.parent if _NAME.fullmatch(folder.name) else output)
        instead = (
            f"the newest complete checkpoint is {whole}" if whole else "there is no complete checkpoint to resume from"
        )
        raise ValueError(f"`resume_from_checkpoint` is {checkpoint!r}, but {problem}; {instead}.")
    return str(folder)


def newest(folder: Path) -> Path | None:
    """The newest fully written checkpoint of a run."""
    return next((path for path in checkpoints(folder) if (path / TRAINER_STATE_NAME).is_file()), None)


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint of a run that can be resumed."""
    return next((path for path in checkpoints(folder) if checkpoint_problem(path) is None), None)


def checkpoint_problem(folder: Path) -> str | None:
    """The first problem of a checkpoint, such as a missing or damaged file; None if it seems complete."""
    return next(_problems(folder), None)


def _problems(folder: Path) -> Iterator[str]:
    state = folder / TRAINER_STATE_NAME
    if not state.is_file():  # transformers writes it last
        yield f"{folder} is incomplete: {TRAINER_STATE_NAME} is missing"
    sharded = [*folder.glob("global_step*"), *folder.glob("pytorch_model_fsdp*")]  # by DeepSpeed, or by FSDP
    if not sharded:
        yield from (f"{folder / name} is missing" for name in _PARTS if not (folder / name).is_file())
        if not any((folder / name).is_file() for name in (*WEIGHTS, *ADAPTERS)):
            yield f"{folder} has no weights, such as {SAFE_WEIGHTS_NAME}"
    elif sharded[0].name.startswith("global_step") and not (folder / "latest").is_file():
        yield f"{folder / 'latest'} is missing, which points DeepSpeed to its shards"
    yield from (f"{folder / name}.pth is missing" for name in _missing_rng_states(folder))
    yield from (f"{file} is empty or damaged" for file in sorted(folder.rglob("*")) if _is_damaged(file))
    for index in folder.rglob("*.safetensors.index.json"):
        shards = sorted({*json.loads(index.read_bytes())["weight_map"].values()})
        yield from (f"{index.parent / name} is missing" for name in shards if not (index.parent / name).is_file())


def _missing_rng_states(folder: Path) -> list[str]:
    """The random states that a checkpoint lacks: one for each process with a cycle file, and at least one.

    Without its random state, a process would draw different samples, and transformers would not report it.
    """
    states = {file.stem for file in folder.glob("rng_state*.pth")}
    if "rng_state" in states:  # of a single process
        return []
    ranks = [file.stem.removeprefix("generation_cycle_") for file in sorted(folder.glob("generation_cycle_*.pt"))]
    wanted = [f"rng_state_{rank}" for rank in ranks] if states or len(ranks) > 1 else ["rng_state"]
    return [name for name in wanted if name not in states]


def _is_damaged(file: Path) -> bool:
    """Whether the file cannot be opened. Only the beginning and end of weights are read."""
    try:
        if file.suffix == ".json":
            json.loads(file.read_bytes())
        elif file.suffix == ".safetensors":
            safe_open(file, "pt")  # compares its length with what its header announces
        elif file.suffix in (".pt", ".pth"):
            ZipFile(file).close()  # its table of contents is at its end
    except (ValueError, BadZipFile, SafetensorError):
        return True
    return False
