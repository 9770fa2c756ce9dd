"""The folder of a run: its settings, one file per finished batch, and the results.

`sorl_trl.records.evaluated` describes these files; the table `results.md` is beside them. Files get their names only
once they are complete, so that a killed run leaves complete batches only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from sorl_trl.files import write_whole
from sorl_trl.records.evaluated import (
    FILES,
    FOLDER,
    MEASURES,
    RESULTS,
    SETTINGS,
    evaluated_shards,
    outdated,
    read_settings,
)
from sorl_trl.types import StopReason

if TYPE_CHECKING:
    from sorl_trl.evaluation.plan import Batch

TABLE = "results.md"
_NAME, _FILES = "model.model_name_or_path", f"model.{FILES}"
Outcome = Mapping[str, Any]
"""From the row of a trajectory: its `question_id`, `question`, `stop_reason` and measures, and what its `environment`
measured, by name."""


class RunFolder:
    """The folder of a run. Processes share it, and each has its own batches."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Start a run here, or continue the one that was started with the same settings.

        Every process may call this, all with equal settings.

        Raises:
            ValueError: The run was started with other settings, the first of which the message names, or the policy
                has changed.
        """
        file = self.path / SETTINGS
        # A start that finished no batch, perhaps with a wrong model, does not fix the settings.
        if not any((self.path / FOLDER).rglob("[0-9]*.parquet")):
            self.path.mkdir(parents=True, exist_ok=True)
            if file.exists() and not {"model", "datasets"} <= {*read_settings(self.path)}:
                raise ValueError(f"output {self.path} has a {SETTINGS} of something else: name another folder")
            _write_json(file, settings)
            return
        before, now = dict(_leaves(read_settings(self.path))), dict(_leaves(json.loads(json.dumps(settings))))
        if before.get(_FILES) is not None and before[_FILES] == now.get(_FILES):
            now[_NAME] = before.get(_NAME)  # the policy may have been moved
        elif problem := outdated(self.path):
            raise ValueError(problem)
        for name in dict.fromkeys([*before, *now]):
            if before.get(name) != now.get(name):
                raise ValueError(
                    f"output {self.path} holds a run with other settings: `{name}` was {before.get(name)!r} and is "
                    f"{now.get(name)!r}. Take the same ones to go on with it, or name another folder (`--output`)"
                )

    def has(self, batch: Batch) -> bool:
        """Whether a batch is finished and no infrastructure failure ended any of its trajectories."""
        shard = self.shard(batch)
        return shard.exists() and not any(map(is_masked, _outcomes(shard)))

    def outcomes(self, dataset: str) -> list[Outcome]:
        """The outcomes of all finished batches of a dataset, in the order of the plan."""
        return [outcome for shard in evaluated_shards(self.path, dataset) for outcome in _outcomes(shard)]

    def finish(self, results: Mapping[str, Any], table: str) -> None:
        write_whole(self.path / TABLE, table.encode())
        _write_json(self.path / RESULTS, results)

    def shard(self, batch: Batch) -> Path:
        """The file of a batch."""
        return self.path / FOLDER / batch.dataset / f"{batch.index:06d}.parquet"


def is_masked(outcome: Outcome) -> bool:
    """Whether an infrastructure failure ended the trajectory, so that it says nothing about the policy."""
    return StopReason(outcome["stop_reason"]).is_infrastructure_failure


def _leaves(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested settings into pairs of a full name, such as "model.dtype", and a value."""
    for name, value in settings.items():
        yield from _leaves(value, f"{above}{name}.") if isinstance(value, dict) else [(f"{above}{name}", value)]


def _outcomes(shard: Path) -> list[Outcome]:
    columns = ["question_id", "question", "stop_reason", *MEASURES, "environment"]
    return [*map(_outcome, pq.ParquetFile(shard).read(columns=columns).to_pylist())]


def _outcome(row: dict[str, Any]) -> Outcome:
    return {**row, "environment": json.loads(row.pop("environment", None) or "{}")}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_whole(path, text.encode())
