"""Training runs as data: what their `trainer_state.json` holds, metric by metric. Nothing is ever unpickled."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sorl_trl.checks import POSITIVE_COUNT, check_number
from sorl_trl.diagnostics.rollout_times import ROLLOUT_FILE, RolloutTimes, load_rollout_times

LogHistory = Sequence[Mapping[str, Any]]
"""`trainer.state.log_history`: one mapping from metric to value per log entry, each with its `step`."""

STATE_FILE = "trainer_state.json"
SETTINGS_FILE = "settings.json"
"""What `train.py` and `sorl train` were told, in the folder of the run itself."""
CONFIGURATION_FILES = ("config.json", "adapter_config.json", "critic/critic_config.json")

SETTINGS = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps")
"""What `trainer_state.json` says about the configuration, beside how far training got."""

SMOOTHED_FROM = 20
"""Points from which a moving average is worth drawing."""


@dataclass(frozen=True)
class Series:
    """The finite values of one metric, in the order in which they were logged; `steps` are optimizer steps."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def smoothed(self) -> Series:
        """Its moving average, each mean at the last step that it covers; the series itself where it is short.

        A mean covers `window_size` points, so that the first few steps have none.
        """
        window = window_size(len(self.values))
        return Series(self.steps[window - 1 :], tuple(moving_average(self.values, window)))


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        name: Its label.
        log_history: Its log entries.
        max_steps: Optimizer steps that it was meant to take, where known.
        configuration: What it was set up with: name of a file -> name of a setting -> value.
        rollout: Where the time of its last rollout went, where known.

    Raises:
        ValueError: `log_history` is not a list of mappings that each have a whole number as `step`.
    """

    name: str
    log_history: LogHistory
    max_steps: int | None = None
    configuration: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rollout: RolloutTimes | None = None

    def __post_init__(self) -> None:
        if isinstance(self.log_history, str | Mapping) or not isinstance(self.log_history, Sequence):
            raise ValueError(
                f"`log_history` of {self.name!r} must be a list, but is a {type(self.log_history).__name__}."
            )
        for index, entry in enumerate(self.log_history):
            step = entry.get("step") if isinstance(entry, Mapping) else None
            if not isinstance(step, int) or isinstance(step, bool):
                raise ValueError(
                    f"Entry {index} of `log_history` of {self.name!r} has the `step` {step!r}; each entry must be a "
                    "mapping with a whole number there."
                )

    @property
    def last_step(self) -> int:
        """The last optimizer step that logged anything; 0 if none did."""
        return max((entry["step"] for entry in self.log_history), default=0)

    def series(self, metric: str) -> Series:
        """Its finite values, empty if there are none: metrics of the rollout are missing from most log entries."""
        points = [point for point in self._points(metric) if math.isfinite(point[1])]
        return Series(tuple(step for step, _ in points), tuple(value for _, value in points))

    def non_finite_steps(self, metric: str) -> list[int]:
        """The steps at which it was logged as NaN or infinite."""
        return [step for step, value in self._points(metric) if not math.isfinite(value)]

    def _points(self, metric: str) -> list[tuple[int, float]]:
        logged = [(entry["step"], entry.get(metric)) for entry in self.log_history]
        return [(step, float(value)) for step, value in logged if isinstance(value, int | float)]


def window_size(count: int) -> int:
    """Points that one mean of a moving average over `count` points covers: a twentieth, but 5 to 100; 1 below 20."""
    return 1 if count < SMOOTHED_FROM else min(max(5, count // 20), 100)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of each `window` consecutive values: `len(values) - window + 1` of them, none if there are fewer values.

    Raises:
        ValueError: `window` is below 1.
    """
    check_number("window", window, POSITIVE_COUNT)
    if len(values) < window:
        return []
    # Summed afresh for each mean: a running sum would never get rid of what one huge value rounds away.
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(values, dtype=float), window)
    return [float(mean) for mean in windows.mean(axis=1)]


def load_runs(folders: Sequence[str | Path]) -> list[Run]:
    """The runs in these folders, each once, named after its folder: see `unique_names` and `load_run`."""
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    return [load_run(path, name) for path, name in zip(paths, unique_names(paths), strict=True)]


def load_run(folder: str | Path, name: str) -> Run:
    """Read a run from its output folder, be it finished or under way.

    Of the `trainer_state.json` in the folder and those in its `checkpoint-*` it takes the one that got furthest, and
    the configuration from JSON files beside it. What training was told and where the time of the last rollout went are
    in the folder itself.

    Raises:
        FileNotFoundError: There is no `trainer_state.json`.
        ValueError: One of the files is not what training writes, or not all of it.
    """
    folder = Path(folder)
    paths = [path for path in (folder / STATE_FILE, *folder.glob(f"checkpoint-*/{STATE_FILE}")) if path.is_file()]
    if not paths:
        raise FileNotFoundError(
            f"{folder} holds no {STATE_FILE}, nor has it a checkpoint-* that does. Give the `output_dir` of a run "
            "that has saved a checkpoint or called `trainer.save_state()`."
        )
    states = {path: _read_object(path) for path in paths}
    # Where steps tie, that is the first: the folder's own, to which the end of training has added a log entry.
    path = max(paths, key=lambda path: _optimizer_steps(path, states[path]))
    state = states[path]
    told = folder / SETTINGS_FILE
    configuration = {SETTINGS_FILE: _read_object(told)} if told.is_file() else {}
    configuration |= {STATE_FILE: {key: state[key] for key in SETTINGS if key in state}}
    beside = [file for file in CONFIGURATION_FILES if (path.parent / file).is_file()]
    configuration |= {file: _read_object(path.parent / file) for file in beside}
    rollout = load_rollout_times(folder / ROLLOUT_FILE) if (folder / ROLLOUT_FILE).is_file() else None
    return Run(name, state["log_history"], state.get("max_steps"), configuration, rollout)


def unique_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many of the last parts of all as it takes to tell them apart."""
    if len(set(paths)) < len(paths):
        raise ValueError(f"`paths` must all differ, but are {', '.join(map(str, paths))}.")
    parts = 1
    while len(set(names := ["/".join(path.as_posix().split("/")[-parts:]) for path in paths])) < len(paths):
        parts += 1
    return names


def _optimizer_steps(path: Path, state: Mapping[str, Any]) -> int:
    step, history = state.get("global_step"), state.get("log_history")
    if not isinstance(step, int) or not isinstance(history, list):
        raise ValueError(f"{path} must have a whole number `global_step` and a list `log_history`.")
    return step


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not complete JSON ({error}). If training is writing it, try again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, but holds a {type(content).__name__}.")
    return content
