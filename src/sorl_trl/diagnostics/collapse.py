"""Detects a collapsing run from its logged metrics (docs/reference/metrics.md): rules, applied to log entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

ITERATION_METRIC = "reward"
"""TRL logs this metric on steps that generate, so an iteration lasts from one entry with it to the next."""
MASKED_METRIC = "trajectories_without_turn"
"""If this metric is 1, the other metrics are means over nothing: 0 or absent."""

Condition = Callable[[Sequence[float]], str | None]
"""Given a metric of each iteration, describes how the condition holds in the last one, or returns None."""
Figures = Mapping[str, float]
"""Metrics of an iteration."""


@dataclass(frozen=True)
class Rule:
    """Conditions on metrics of docs/reference/metrics.md that must all hold in the same iteration."""

    name: str
    conditions: Mapping[str, Condition]
    """One condition per metric, by the metric's name."""
    hint: str
    """Advice at the end of the alarm's message."""
    at_once: bool = field(default=False, kw_only=True)
    """Whether each log entry is judged separately, as soon as it is logged, and an alarm means broken weights."""

    def breach(self, history: Sequence[Figures]) -> str | None:
        """Describes how all conditions hold in the last iteration, if they do."""
        found = {name: holds([each[name] for each in history]) for name, holds in self.conditions.items()}
        return None if None in found.values() else ", ".join(f"`{name}` {how}" for name, how in found.items())


def level(history: Sequence[float], threshold: float, patience: int = 1) -> str | None:
    """At least `threshold` for `patience` iterations in a row."""
    last = history[-patience:]
    if len(last) < patience or min(last) < threshold:
        return None
    return f"is {last[-1]:.4g}, at or above {threshold:.4g}"


def fall(history: Sequence[float], share: float, minimum: float, window: int = 1) -> str | None:
    """A mean over `window` iterations below `share`, between 0 and 1, of the best such mean so far.

    It is not judged until the best mean is at least `minimum`, so that noise around 0 does not count as a fall.
    """
    means = [mean(history[i - window : i]) for i in range(window, len(history) + 1)]
    best = max(filter(math.isfinite, means), default=-math.inf)
    if best < minimum or not means[-1] < share * best:
        return None
    return f"is {means[-1]:.4g}, fallen from a best of {best:.4g} to below {share * best:.4g}"


def not_finite(history: Sequence[float]) -> str | None:
    """NaN or infinite; also negative, which is how DeepSpeed marks such a gradient norm."""
    return None if math.isfinite(history[-1]) and history[-1] >= 0 else f"is {history[-1]:g}"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # `statistics.fmean` raises for infinities of both signs


_SLOWER = "lower the learning rate or make fewer updates per rollout"
_ANEW = "start a new run, possibly with another learning rate, from a checkpoint before"

# Thresholds of reward and KL are fitted to tiny policies. The loss would add nothing to the gradient norm: if it is
# NaN, so is its gradient.
DEFAULT_RULES = (
    Rule(
        "not_finite",
        {"grad_norm": not_finite},
        f"the weights may not be finite either: {_ANEW} this step, and {_SLOWER}",
        at_once=True,
    ),
    Rule(
        "nothing_to_train_on",
        {MASKED_METRIC: partial(level, threshold=1.0, patience=2)},
        "the search engine answers no query: restart it and resume",
    ),
    Rule(
        "high_kl",
        {"kl_to_old": partial(level, threshold=0.082, patience=2)},
        f"{_SLOWER}, or set or lower `target_kl`",
    ),
    Rule(
        "harmful_updates",
        {"reward": partial(fall, share=0.8, minimum=0.1, window=2), "kl_to_old": partial(level, threshold=0.04)},
        f"{_SLOWER}, or set or lower `target_kl`",
    ),
    Rule(
        "reward_fall",
        {"reward": partial(fall, share=0.62, minimum=0.1, window=3)},
        f"{_ANEW} the fall, and {_SLOWER}",
    ),
)


@dataclass(frozen=True)
class Alarm:
    """An alarm that the conditions of a rule have begun to hold."""

    rule: str
    """Its name."""
    step: int
    """The step of the log entry that raised it: the first entry after the judged iteration."""
    message: str


class CollapseDetector:
    """Judges each iteration by `rules` at the first log entry of the next one, so the last iteration is never judged.

    Within an iteration, a metric is averaged over the entries that have it; for names that end in `_max`, the largest
    value counts. None and NaN count as absent, and a rule skips iterations that lack one of its metrics. If every
    trajectory of an iteration was masked, no other metric is judged, because the iteration contains no information
    about the policy.

    A rule fires when all its conditions begin to hold, and again only after one of them has ceased to hold. Rules must
    have different names.
    """

    def __init__(self, rules: Iterable[Rule] = DEFAULT_RULES) -> None:
        self.rules = tuple(rules)
        self._entries: list[Mapping[str, Any]] = []
        """The entries of the current iteration."""
        self._history: dict[str, list[Figures]] = {rule.name: [] for rule in self.rules}
        self.holding: set[str] = set()
        """The rules that have fired and still hold. A rule that is removed may fire again."""

    def observe(self, entry: Mapping[str, Any]) -> list[Alarm]:
        """Read the next entry of a `log_history` and return the alarms that it raises."""
        judged: list[tuple[Rule, Sequence[Figures]]] = []
        if ITERATION_METRIC in entry:
            judged += self._completed()
            self._entries.clear()
        self._entries.append(entry)
        figures = [(rule, _figures(rule, entry.get)) for rule in self.rules if rule.at_once]
        judged += [(rule, [of_entry]) for rule, of_entry in figures if of_entry]
        alarms = []
        for rule, history in judged:
            breach = rule.breach(history)
            if breach is None:
                self.holding.discard(rule.name)
            elif rule.name not in self.holding:
                self.holding.add(rule.name)
                step = int(entry["step"])
                message = f"{rule.name}: by step {step} {breach}: {rule.hint}."
                alarms.append(Alarm(rule.name, step, message))
        return alarms

    def _completed(self) -> Iterator[tuple[Rule, Sequence[Figures]]]:
        """The rules with all their metrics in the completed iteration, with these metrics of all iterations so far."""
        masked = _summary(MASKED_METRIC, self._entries) == 1.0
        for rule in (each for each in self.rules if not each.at_once):
            figures = _figures(rule, lambda metric: _summary(metric, self._entries))
            if figures and (not masked or figures.keys() == {MASKED_METRIC}):
                self._history[rule.name].append(figures)
                yield rule, self._history[rule.name]


def _figures(rule: Rule, figure: Callable[[str], Any]) -> Figures | None:
    """The rule's metrics, `None` if one is absent."""
    found = {metric: figure(metric) for metric in rule.conditions}
    return found if all(isinstance(value, int | float) for value in found.values()) else None


def _summary(metric: str, entries: Iterable[Mapping[str, Any]]) -> float | None:
    logged = [entry.get(metric) for entry in entries]
    values = [float(value) for value in logged if isinstance(value, int | float) and not math.isnan(value)]
    if not values:
        return None
    return max(values) if metric.endswith("_max") else mean(values)
