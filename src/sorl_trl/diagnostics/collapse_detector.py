"""Which rules of a collapsing run hold, from log entries alone: while it trains, or of a run that is over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sorl_trl.diagnostics.collapse_rules import DEFAULT_RULES, MASKED_METRIC, NotFinite, Rule, mean

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
    message: str


class CollapseDetector:
    """Judges each iteration by `rules` when it is complete, with the first log entry of the next one: never the last.

    Within an iteration, a metric is averaged over the entries that have it; of names that end in `_max` or `_min` the
    largest or smallest value is taken. None and NaN count as absent, and a metric that is absent fires nothing. So do
    all others where every trajectory was masked: that iteration says nothing about the policy.

    A rule fires when its condition begins to hold, and again only after the condition has not held once. `NotFinite`
    fires with the entry that tells of it, also in iterations that the others do not judge. Rules have different names.
    """

    def __init__(self, rules: Iterable[Rule] = DEFAULT_RULES) -> None:
        self.rules = tuple(rules)
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
        """The alarms of the iteration that an entry of `step` completes."""
        iteration = len(self.starts) - 1
        self.judged.append(iteration)
        new = {metric: _summary(metric, values) for metric, values in self._values.items() if values}
        if new.get(MASKED_METRIC) == 1.0:
            new = {MASKED_METRIC: 1.0}
        for metric in new.keys() & self._history.keys():
            self._history[metric].append(new[metric])
        alarms = []
        for rule in self.rules:
            if rule.metric not in new or isinstance(rule, NotFinite):
                continue
            breach = rule.breach(self._history[rule.metric])
            if self._begins(rule, breach):
                message = f"{rule.name}: in iteration {iteration} (before step {step}) `{rule.metric}` {breach}: "
                alarms.append(Alarm(rule, iteration, step, f"{message}{rule.hint}."))
        return alarms

    def _faults(self, entry: Mapping[str, Any]) -> list[Alarm]:
        """The alarms of an entry by itself; entries without the rule's metric, as of an evaluation, say nothing."""
        alarms = []
        for rule in self.rules:
            if not isinstance(rule, NotFinite) or rule.metric not in entry:
                continue
            fault = rule.fault(entry)
            if self._begins(rule, fault):
                step = int(entry["step"])
                message = f"{rule.name}: {fault} in the log entry of step {step}: {rule.hint}."
                alarms.append(Alarm(rule, len(self.starts) - 1, step, message))
        return alarms

    def _begins(self, rule: Rule, breach: str | None) -> bool:
        """Whether the condition of a rule holds, and has not held when it was judged before."""
        if breach is None:
            self._breached.discard(rule.name)
            return False
        begins = rule.name not in self._breached
        self._breached.add(rule.name)
        return begins


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
