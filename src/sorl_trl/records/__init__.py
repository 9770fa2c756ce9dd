"""Trajectories in Parquet files: as an evaluation saw them, and as an update of the policy did."""

from __future__ import annotations

import os
from pathlib import Path

RECIPE_FILE = "recipe.yaml"
"""In the folder of a training run: what it was told."""
EVALUATION_FOLDER = "evaluation"
"""In the folder of a policy: its evaluation, unless another place is named."""
POLICY_FILES = ("config.json", "adapter_config.json")
"""A folder with one of them holds a policy."""


def checkpoints(run: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of a run, whole or not, the newest first."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in Path(run).glob("checkpoint-*") if path.is_dir()}
    return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: int(steps[path]), reverse=True)


def evaluation_of(folder: str | os.PathLike[str]) -> Path:
    """Where the policy of a run is evaluated: not in a checkpoint, which training may remove."""
    policy = policy_in(folder) or Path(folder)
    own = policy == Path(folder)
    return Path(folder) / (EVALUATION_FOLDER if own else f"{EVALUATION_FOLDER}_{policy.name}")


def policy_in(folder: str | os.PathLike[str]) -> Path | None:
    """The folder of the policy of a run: its own, or while it trains its newest checkpoint; None where it has none."""
    folders = (Path(folder), *checkpoints(folder))
    return next((path for path in folders if any((path / name).is_file() for name in POLICY_FILES)), None)
