"""Reads the logs of training runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sorl_trl.files import check_run_folder

STATE_FILE = "trainer_state.json"

SMOOTHED_FROM = 20
"""The number of points from which a moving average is drawn."""


@dataclass(frozen=True)
class Series:
    """The finite values of one metric, in the order in which they were logged; `steps` are optimizer steps."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def smoothed(self) -> Series:
        """The moving average, with each mean at the last step that it covers; a short series is returned unchanged.

        A mean covers a twentieth of the points, but at least 5 and at most 100, so the first few steps have none.
        """
        if len(self.values) < SMOOTHED_FROM:
            return self
        window = min(max(5, len(self.values) // 20), 100)
        means = np.lib.stride_tricks.sliding_window_view(np.asarray(self.values), window).mean(axis=1)
        return Series(self.steps[window - 1 :], tuple(map(float, means)))


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        name: The run's label.
        log_history: `trainer.state.log_history`: a mapping from metric to value per log entry, each with its `step`.
        max_steps: The planned number of optimizer steps, if known.
    """

    name: str
    log_history: Sequence[Mapping[str, Any]]
    max_steps: int | None = None

    @property
    def last_step(self) -> int:
        """The last optimizer step that logged anything; 0 if none did."""
        return max((entry["step"] for entry in self.log_history), default=0)

    def series(self, metric: str) -> Series:
        """The metric's finite values, possibly none; most log entries lack the metrics of rollouts."""
        logged = [(entry["step"], entry.get(metric)) for entry in self.log_history]
        finite = [(step, value) for step, value in logged if isinstance(value, int | float) and math.isfinite(value)]
        return Series(tuple(step for step, _ in finite), tuple(float(value) for _, value in finite))


def load_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Load the runs in these folders, each once, named after its path."""
    return [load_run(path, str(path)) for path in dict.fromkeys(map(Path, folders))]


def load_run(folder: Path, name: str) -> Run:
    """Read a run, finished or under way, from its output folder.

    It takes the `trainer_state.json` that got furthest, in the folder itself or in one of its `checkpoint-*`.

    Raises:
        FileNotFoundError: There is no `trainer_state.json`.
        ValueError: A file is incomplete, for example because training is writing it.
    """
    check_run_folder(folder)
    paths = [path for path in (folder / STATE_FILE, *folder.glob(f"checkpoint-*/{STATE_FILE}")) if path.is_file()]
    if not paths:
        raise FileNotFoundError(
            f"{folder} holds no {STATE_FILE}, and neither does a checkpoint-* in it: name a run's `output_dir`"
        )
    # If steps tie, `max` takes the first, the folder's own, to which the end of training has added a log entry.
    state = max(map(_read, paths), key=lambda state: int(state["global_step"]))
    return Run(name, state["log_history"], state.get("max_steps"))


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not complete JSON ({error}). If training is writing it, try again.") from error
    return content
