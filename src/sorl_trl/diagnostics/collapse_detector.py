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
    step: int
    """The step of the log entry with which it came: the first one after the iteration that was judged."""
    message: str


class CollapseDetector:
    """Judges each iteration by `rules` when it is complete, with the first log entry of the next one: never the last.

    Within an iteration, a metric is averaged over the entries that have it; of names that end in `_max` the largest
    value is taken. None and NaN count as absent, and a metric that is absent fires nothing. So do all others where
    every trajectory was masked: that iteration says nothing about the policy.

    A rule fires when its condition begins to hold, and again only after the condition has not held once. `NotFinite`
    fires with the entry that tells of it, also in iterations that the others do not judge. Rules have different names.
    """

    def __init__(self, rules: Iterable[Rule] = DEFAULT_RULES) -> None:
        self.rules = tuple(rules)
        self._entries: list[Mapping[str, Any]] | None = None
        """Of the iteration that has begun; None before the first."""
        self._history: dict[str, list[float]] = {rule.name: [] for rule in self.rules}
        self.holding: set[str] = set()
        """The rules that have fired and whose condition still holds; those that are taken out may fire again."""

    def observe(self, entry: Mapping[str, Any]) -> list[Alarm]:
        """Take the next entry of a `log_history`, and return the alarms of the iteration that it completes."""
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
        """The alarms of the iteration of these entries, which an entry of `step` completes."""
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
        """The alarm of a rule whose condition holds, and has not held when it was judged before."""
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
    """Find all alarms of a recorded run, as they would have come while it trained.

    `log_history` is that of a `trainer.state` or of a `trainer_state.json`.
    """
    detector = CollapseDetector(rules)
    return [alarm for entry in log_history for alarm in detector.observe(entry)]
