"""Trajectories in Parquet files: as an evaluation recorded them, and as training updates did."""

from __future__ import annotations

import os
from pathlib import Path

RECIPE_FILE = "recipe.yaml"
"""The arguments of a training run, in its folder."""
EVALUATION_FOLDER = "evaluation"
"""The default folder for the evaluation of a policy, in the policy's folder."""
POLICY_FILES = ("config.json", "adapter_config.json")
"""A folder with one of these files holds a policy."""


def checkpoints(run: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of a run, complete or not, newest first."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in Path(run).glob("checkpoint-*") if path.is_dir()}
    return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: int(steps[path]), reverse=True)


def evaluation_of(folder: str | os.PathLike[str]) -> Path:
    """The folder for the evaluation of a run's policy. It is never in a checkpoint, which training may delete."""
    policy = policy_in(folder) or Path(folder)
    own = policy == Path(folder)
    return Path(folder) / (EVALUATION_FOLDER if own else f"{EVALUATION_FOLDER}_{policy.name}")


def policy_in(folder: str | os.PathLike[str]) -> Path | None:
    """The folder of a run's policy: the run's own or, during training, its newest checkpoint; None without either."""
    folders = (Path(folder), *checkpoints(folder))
    return next((path for path in folders if any((path / name).is_file() for name in POLICY_FILES)), None)
