"""Training runs as data: what they logged."""

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
"""Points from which a moving average is worth drawing."""


@dataclass(frozen=True)
class Series:
    """The finite values of one metric, in the order in which they were logged; `steps` are optimizer steps."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def smoothed(self) -> Series:
        """Its moving average, each mean at the last step that it covers; the series itself where it is short.

        A mean covers a twentieth of the points, but 5 to 100, so that the first few steps have none.
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
        name: Its label.
        log_history: `trainer.state.log_history`: a mapping from metric to value per log entry, each with its `step`.
        max_steps: Optimizer steps that it was meant to take, where known.
    """

    name: str
    log_history: Sequence[Mapping[str, Any]]
    max_steps: int | None = None

    @property
    def last_step(self) -> int:
        """The last optimizer step that logged anything; 0 if none did."""
        return max((entry["step"] for entry in self.log_history), default=0)

    def series(self, metric: str) -> Series:
        """Its finite values, empty if there are none: metrics of the rollout are missing from most log entries."""
        logged = [(entry["step"], entry.get(metric)) for entry in self.log_history]
        finite = [(step, value) for step, value in logged if isinstance(value, int | float) and math.isfinite(value)]
        return Series(tuple(step for step, _ in finite), tuple(float(value) for _, value in finite))


def load_runs(folders: Sequence[str | Path]) -> list[Run]:
    """The runs in these folders, each once, with its path as its name."""
    return [load_run(path, str(path)) for path in dict.fromkeys(map(Path, folders))]


def load_run(folder: Path, name: str) -> Run:
    """Read a run from its output folder, be it finished or under way.

    Of the `trainer_state.json` in the folder and those in its `checkpoint-*` it takes the one that got furthest.

    Raises:
        FileNotFoundError: There is no `trainer_state.json`.
        ValueError: A file is not complete, as while training writes it.
    """
    check_run_folder(folder)
    paths = [path for path in (folder / STATE_FILE, *folder.glob(f"checkpoint-*/{STATE_FILE}")) if path.is_file()]
    if not paths:
        raise FileNotFoundError(
            f"{folder} holds no {STATE_FILE}, nor a checkpoint-* that does: name the `output_dir` of a run with one"
        )
    # Where steps tie, that is the first: the folder's own, to which the end of training has added a log entry.
    state = max(map(_read, paths), key=lambda state: int(state["global_step"]))
    return Run(name, state["log_history"], state.get("max_steps"))


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not complete JSON ({error}). If training is writing it, try again.") from error
    return content
