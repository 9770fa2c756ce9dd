"""Applies the rules of collapse to log entries, while a run trains or afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sorl_trl.diagnostics.collapse_rules import DEFAULT_RULES, MASKED_METRIC, NotFinite, Rule, mean

ITERATION_METRIC = "reward"
"""TRL logs this metric on the steps that generate, so an iteration lasts from one entry that has it to the next."""


@dataclass(frozen=True)
class Alarm:
    """A message that the condition of a rule has begun to hold."""

    rule: Rule
    step: int
    """The step of the log entry that raised it, which is the first entry after the judged iteration."""
    message: str


class CollapseDetector:
    """Judges each iteration by `rules` at the first log entry of the next one, and so never judges the last.

    Within an iteration, a metric is averaged over the entries that have it; for names that end in `_max`, the largest
    value counts. None and NaN count as absent, and an absent metric fires no rule. If every trajectory of an iteration
    was masked, no metric does, because the iteration says nothing about the policy.

    A rule fires when its condition begins to hold, and again only after the condition has ceased to hold. `NotFinite`
    fires at the entry itself, even in iterations that the other rules do not judge. Rules must have different names.
    """

    def __init__(self, rules: Iterable[Rule] = DEFAULT_RULES) -> None:
        self.rules = tuple(rules)
        self._entries: list[Mapping[str, Any]] | None = None
        """The entries of the iteration that has begun; None before the first."""
        self._history: dict[str, list[float]] = {rule.name: [] for rule in self.rules}
        self.holding: set[str] = set()
        """The rules that have fired and whose condition still holds. A rule that is removed may fire again."""

    def observe(self, entry: Mapping[str, Any]) -> list[Alarm]:
        """Read the next entry of a `log_history`, and return the alarms of the iteration that it completes."""
        step = int(entry["step"])
        alarms: list[Alarm] = []
        if ITERATION_METRIC in entry:
            alarms += self._judge(self._entries or [], step)
            self._entries = []
        if self._entries is not None:
            self._entries.append(entry)
        for rule in self.rules:
            value = entry.get(rule.metric)
            if isinstance(rule, NotFinite) and isinstance(value, int | float):
                alarms += self._check(rule, [value], step)
        return alarms

    def _judge(self, entries: Sequence[Mapping[str, Any]], step: int) -> list[Alarm]:
        """The alarms of the iteration with these entries, which an entry of `step` completes."""
        masked = _summary(MASKED_METRIC, entries) == 1.0
        alarms = []
        for rule in self.rules:
            value = _summary(rule.metric, entries)
            if value is None or isinstance(rule, NotFinite) or (masked and rule.metric != MASKED_METRIC):
                continue
            self._history[rule.name].append(value)
            alarms += self._check(rule, self._history[rule.name], step)
        return alarms

    def _check(self, rule: Rule, history: Sequence[float], step: int) -> list[Alarm]:
        """The alarm of a rule whose condition holds, but did not when it was last judged."""
        breach = rule.breach(history)
        if breach is None:
            self.holding.discard(rule.name)
        elif rule.name not in self.holding:
            self.holding.add(rule.name)
            return [Alarm(rule, step, f"{rule.name}: by step {step} `{rule.metric}` {breach}: {rule.hint}.")]
        return []


def _summary(metric: str, entries: Iterable[Mapping[str, Any]]) -> float | None:
    logged = [entry.get(metric) for entry in entries]
    values = [float(value) for value in logged if isinstance(value, int | float) and not math.isnan(value)]
    if not values:
        return None
    return max(values) if metric.endswith("_max") else mean(values)


def detect(log_history: Iterable[Mapping[str, Any]], rules: Iterable[Rule] = DEFAULT_RULES) -> list[Alarm]:
    """Find all alarms of a recorded run, as they would have been raised while it trained.

    `log_history` comes from a `trainer.state` or a `trainer_state.json`.
    """
    detector = CollapseDetector(rules)
    return [alarm for entry in log_history for alarm in detector.observe(entry)]
