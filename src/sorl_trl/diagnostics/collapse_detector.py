"""Which rules of a collapsing run hold, from log entries alone: while it trains, or of a run that is over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sorl_trl.diagnostics.collapse_rules import (
    DEFAULT_RULES,
    MASKED_METRIC,
    Breach,
    Fall,
    Growth,
    Level,
    NotFinite,
    Rule,
    mean,
)

__all__ = [
    "DEFAULT_RULES",
    "Alarm",
    "Breach",
    "CollapseDetector",
    "Fall",
    "Growth",
    "Level",
    "NotFinite",
    "Rule",
    "detect",
]

ITERATION_METRIC = "reward"
"""TRL logs it on the steps that generate: an iteration lasts from one entry that has it to the next."""


@dataclass(frozen=True)
class Alarm:
    """The news that the condition of a rule has begun to hold."""

    rule: Rule
    iteration: int
    """The iteration that was judged, from 0; of `NotFinite`, the one that the entry is in."""
    step: int
    """The step of the log entry after it, which completed it; of `NotFinite`, the step of the entry itself."""
    value: float
    threshold: float
    message: str


class CollapseDetector:
    """Judges each iteration by `rules` when it is complete, with the first log entry of the next one: never the last.

    Within an iteration, a metric is averaged over the entries that have it; of names that end in `_max` or `_min` the
    largest or smallest value is taken. None and NaN count as absent, and a metric that is absent fires nothing. So do
    all others where every trajectory was masked: that iteration says nothing about the policy.

    A rule fires when its condition begins to hold, and again only after the condition has not held once. `NotFinite`
    fires with the entry that tells of it, also in iterations that the others do not judge.

    Raises:
        ValueError: two rules have the same name.
    """

    def __init__(self, rules: Iterable[Rule] = DEFAULT_RULES) -> None:
        self.rules = tuple(rules)
        names = [rule.name for rule in self.rules]
        if len(set(names)) < len(names):
            raise ValueError(f"`rules` has the names {names}, but each must be different.")
        self.starts: list[int] = []
        """Step of the first log entry of each iteration; the last one is not complete yet."""
        self.judged: list[int] = []
        """The iterations that were judged: all but the last one, and what `restart` has left out."""
        self._values: dict[str, list[float]] = {}
        self._blind_until = 0
        self._clear()

    def _clear(self) -> None:
        self._history: dict[str, list[float]] = {rule.metric: [] for rule in self.rules}
        self._breached: set[str] = set()

    def restart(self, cooldown: int) -> None:
        """Forget what was seen, and leave out the iteration that has begun and the `cooldown` ones after it."""
        self._clear()
        self._blind_until = len(self.starts) + cooldown

    def rearm(self) -> None:
        """Let rules fire again whose condition still holds."""
        self._breached.clear()

    def observe(self, entry: Mapping[str, Any]) -> list[Alarm]:
        """Take the next entry of a `log_history`, and return the alarms of the iteration that it completes."""
        alarms: list[Alarm] = []
        if ITERATION_METRIC in entry:
            if len(self.starts) > self._blind_until:
                alarms = self._judge(int(entry["step"]))
            self.starts.append(int(entry["step"]))
            self._values = {metric: [] for metric in (*self._history, MASKED_METRIC)}
        for metric, values in self._values.items():
            value = entry.get(metric)
            if isinstance(value, int | float) and not math.isnan(value):
                values.append(float(value))
        return alarms + self._faults(entry)

    def _judge(self, step: int) -> list[Alarm]:
        self.judged.append(len(self.starts) - 1)
        new = {metric: _summary(metric, values) for metric, values in self._values.items() if values}
        if new.get(MASKED_METRIC) == 1.0:
            new = {MASKED_METRIC: 1.0}
        for metric in new.keys() & self._history.keys():
            self._history[metric].append(new[metric])
        rules = [rule for rule in self.rules if rule.metric in new and not isinstance(rule, NotFinite)]
        return [alarm for rule in rules if (alarm := self._apply(rule, step))]

    def _faults(self, entry: Mapping[str, Any]) -> list[Alarm]:
        """The alarms of an entry by itself; entries without the rule's metric, as of an evaluation, say nothing."""
        alarms = []
        for rule in self.rules:
            if not isinstance(rule, NotFinite) or rule.metric not in entry:
                continue
            fault = rule.fault(entry)
            if fault is None:
                self._breached.discard(rule.name)
            elif rule.name not in self._breached:
                self._breached.add(rule.name)
                step = int(entry["step"])
                message = f"{rule.name}: {fault} in the log entry of step {step}: {rule.hint}."
                alarms.append(Alarm(rule, len(self.starts) - 1, step, math.nan, math.nan, message))
        return alarms

    def _apply(self, rule: Rule, step: int) -> Alarm | None:
        breach = rule.breach(self._history[rule.metric])
        if breach is None:
            self._breached.discard(rule.name)
            return None
        if rule.name in self._breached:
            return None
        self._breached.add(rule.name)
        iteration = self.judged[-1]
        value, threshold, side = breach
        message = (
            f"{rule.name}: `{rule.metric}` is {value:.4g} in iteration {iteration} (before step {step}), {side} "
            f"{threshold:.4g}: {rule.hint}."
        )
        return Alarm(rule, iteration, step, value, threshold, message)


def _summary(metric: str, values: Sequence[float]) -> float:
    if metric.endswith("_max"):
        return max(values)
    return min(values) if metric.endswith("_min") else mean(values)


def detect(log_history: Iterable[Mapping[str, Any]], rules: Iterable[Rule] = DEFAULT_RULES) -> list[Alarm]:
    """Find all alarms of a recorded run, as they would have come while it trained.

    Args:
        log_history: `trainer.state.log_history`, or that of a `trainer_state.json`.
        rules: as for `CollapseDetector`.
    """
    detector = CollapseDetector(rules)
    return [alarm for entry in log_history for alarm in detector.observe(entry)]
