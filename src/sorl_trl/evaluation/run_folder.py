"""The directory of a run: its settings, one file per finished batch, and the results.

`sorl_trl.records.evaluated` says which files there are, beside the table `results.md`.
Files are written under another name and renamed when whole, so that a killed run leaves complete batches only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from sorl_trl.evaluation.plan import Batch
from sorl_trl.files import write_whole
from sorl_trl.records.evaluated import (
    FOLDER,
    MEASURES,
    RESULTS,
    SETTINGS,
    EvaluatedTrajectory,
    evaluated_shards,
    read_evaluated,
    read_settings,
)
from sorl_trl.types import StopReason

TABLE = "results.md"
_MISSING = "nothing"


@dataclass(frozen=True)
class Outcome:
    """What a report needs of one trajectory."""

    question_id: str
    question: str
    sample: int
    stop_reason: StopReason
    measures: Mapping[str, float | None]

    @property
    def key(self) -> tuple[str, str]:
        """Names the question within its dataset, over runs: the text too, for ids may be mere row numbers."""
        return self.question_id, self.question

    @property
    def is_masked(self) -> bool:
        """Whether an infrastructure failure ended it: it says nothing about the policy."""
        return self.stop_reason.is_infrastructure_failure


class RunFolder:
    """A run's directory. Processes share it, each with batches of its own."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Start a run here, or go on with the one that was started with the same settings.

        Every process may call this, all with equal settings.

        Raises:
            ValueError: Its run was started with other settings; the message names them.
        """
        file = self.path / SETTINGS
        # A first start that made nothing, with a wrong model perhaps, binds nobody.
        if not any((self.path / FOLDER).rglob("[0-9]*.parquet")):
            self.path.mkdir(parents=True, exist_ok=True)
            _write_json(file, settings)
        elif differences := _differences(self.settings, json.loads(json.dumps(settings))):
            raise ValueError(
                f"output {self.path} holds a run with other settings: {'; '.join(differences)}. Take the same ones "
                "to go on with it, or name another directory"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Raises FileNotFoundError if no run was started here."""
        return read_settings(self.path)

    def batch_outcomes(self, batch: Batch) -> list[Outcome]:
        """The outcomes of a batch, in its order; empty if it was not made yet."""
        shard = self.shard(batch)
        return list(_outcomes(shard)) if shard.exists() else []

    def outcomes(self, dataset: str) -> list[Outcome]:
        """The outcomes of all finished batches of a dataset, in the order of the plan."""
        return [outcome for shard in evaluated_shards(self.path, dataset) for outcome in _outcomes(shard)]

    def finish(self, results: Mapping[str, Any], table: str) -> None:
        """Write the results, and delete what killed processes left unfinished."""
        for partial in (self.path / FOLDER).glob("*/.*"):
            partial.unlink()
        write_whole(self.path / TABLE, table.encode())
        _write_json(self.path / RESULTS, results)

    @property
    def is_finished(self) -> bool:
        return (self.path / RESULTS).exists()

    def shard(self, batch: Batch) -> Path:
        """Where a batch is kept."""
        return self.path / FOLDER / batch.dataset / f"{batch.index:06d}.parquet"


def read_trajectories(run: str | os.PathLike[str]) -> Iterator[EvaluatedTrajectory]:
    """All trajectories of a run, in the order in which its datasets and questions were given.

    A run that is not finished gives those of its finished batches.

    Raises:
        FileNotFoundError: `run` is not the directory of a run.
    """
    for dataset in read_settings(run)["datasets"]:
        yield from read_evaluated(run, dataset)


def _outcomes(shard: Path) -> Iterator[Outcome]:
    columns = ["question_id", "question", "sample", "stop_reason", *MEASURES]
    for row in pq.ParquetFile(shard).read(columns=columns).to_pylist():
        measures = {name: row[name] for name in MEASURES}
        reason = StopReason(row["stop_reason"])
        yield Outcome(row["question_id"], row["question"], row["sample"], reason, measures)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_whole(path, text.encode())


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each setting that differs, groups of settings looked into."""
    there, here = dict(_flat(before)), dict(_flat(now))
    return [
        f"{name} was {there.get(name, _MISSING)!r} and is {here.get(name, _MISSING)!r}"
        for name in dict.fromkeys([*there, *here])
        if there.get(name, _MISSING) != here.get(name, _MISSING)
    ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
