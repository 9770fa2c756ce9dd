"""Runs side by side: which of them are seeds of one method, and in which settings they differ."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sorl_trl.diagnostics.runs import SETTINGS_FILE, Run

PLACES = frozenset({"output_dir", "run_name", "logging_dir", "hub_model_id", "resume_from_checkpoint"})
"""Settings that say where a run is, and nothing about what it does."""
SEEDS = frozenset({"seed", "data_seed"})


@dataclass(frozen=True)
class Spread:
    """A metric over the runs of a group: at each step the lowest, the mean and the highest moving average."""

    steps: tuple[int, ...]
    low: tuple[float, ...]
    mean: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Group:
    """The runs that are drawn as one line: a single one, or the seeds of one method.

    Args:
        name: Its label.
        runs: One or more.
    """

    name: str
    runs: tuple[Run, ...]

    def spread(self, metric: str) -> Spread:
        """Over the runs that have the metric and have come that far; between two of its points a run is on a line."""
        averages = [average for run in self.runs if (average := run.series(metric).smoothed()).values]
        steps = sorted({step for average in averages for step in average.steps})
        if not steps:
            return Spread((), (), (), ())
        rows = [np.interp(steps, each.steps, each.values, left=np.nan, right=np.nan) for each in averages]
        low, mean, high = (tuple(map(float, over(rows, axis=0))) for over in (np.nanmin, np.nanmean, np.nanmax))
        return Spread(tuple(steps), low, mean, high)


def settings_of(run: Run) -> dict[str, Any]:
    """Name of a setting -> value, of all its files; where two have one, what training was told counts."""
    told = run.configuration.get(SETTINGS_FILE, {})
    return {key: value for file in run.configuration.values() for key, value in file.items()} | dict(told)


def differing_settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Name of a setting in which runs differ -> its value in each, "–" where its files do not have it.

    Places do not count.
    """
    of_runs = [settings_of(run) for run in runs]
    names = sorted({name for settings in of_runs for name in settings} - PLACES)
    table = {name: [_text(settings[name]) if name in settings else "–" for settings in of_runs] for name in names}
    return {name: values for name, values in table.items() if len(set(values)) > 1}


def group_runs(runs: Sequence[Run], by_name: bool = False) -> list[Group]:
    """The runs in groups, in the order of the first of each.

    Runs are seeds of one method where they were told the same but for seeds and places (`settings.json`).

    Args:
        runs: With different names.
        by_name: Runs whose names differ in the number at their end alone are seeds of one method, too.
    """
    found: dict[Any, list[Run]] = {}
    for run in runs:
        found.setdefault(_method_of(run, by_name), []).append(run)
    names = [_common_name([run.name for run in members]) for members in found.values()]
    return [
        Group(name if names.count(name) == 1 else _listed([run.name for run in members]), tuple(members))
        for name, members in zip(names, found.values(), strict=True)
    ]


def _method_of(run: Run, by_name: bool) -> str:
    """The same for runs that are seeds of one method, and no other's else."""
    told = run.configuration.get(SETTINGS_FILE)
    if by_name and re.search(r"\d$", run.name):
        return f"name {_without_number(run.name)}"
    if not told:
        return f"run {run.name}"
    method = {key: value for key, value in told.items() if key not in PLACES | SEEDS}
    return f"settings {json.dumps(method, sort_keys=True, default=str)}"


def _common_name(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    common = {_without_number(name) for name in names}
    return f"{common.pop()} ({len(names)} runs)" if len(common) == 1 and "" not in common else _listed(names)


def _without_number(name: str) -> str:
    """Without the number at its end, and what leads to it: "gspo-seed3" is "gspo"."""
    return re.sub(r"[\W_]*(seed)?[\W_]*\d*$", "", name)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def places(groups: Sequence[Group]) -> dict[str, int]:
    """Name of a run -> the place of its group, which is that of its colour."""
    return {run.name: place for place, group in enumerate(groups) for run in group.runs}
