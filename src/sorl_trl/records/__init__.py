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


def policy_in(folder: str | os.PathLike[str]) -> Path | None:
    """The folder of the policy of a run: its own, or while it trains its newest checkpoint; None where it has none."""
    checkpoints = [path for path in Path(folder).glob("checkpoint-*") if path.name[len("checkpoint-") :].isdecimal()]
    newest_first = sorted(checkpoints, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    folders = (Path(folder), *newest_first)
    return next((path for path in folders if any((path / name).is_file() for name in POLICY_FILES)), None)
