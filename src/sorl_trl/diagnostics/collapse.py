"""Tells a collapsing run from the metrics of docs/metrics.md: rules, and their application to log entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

ITERATION_METRIC = "reward"
"""TRL logs this metric on the steps that generate, so an iteration lasts from one entry that has it to the next."""
MASKED_METRIC = "trajectories_without_turn"
"""If this metric is 1, the other metrics are means over nothing: 0 or absent."""


@dataclass(frozen=True)
class Rule:
    """A condition on one metric of docs/metrics.md."""

    name: str
    metric: str
    breach: Callable[[Sequence[float]], str | None]
    """Describes how the condition holds in the last iteration, if it does, given the metric of each iteration."""
    hint: str
    """Advice, which ends the alarm's message."""
    at_once: bool = False
    """Whether each log entry is judged by itself, as soon as it is there, and an alarm means broken weights."""


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
    """NaN or infinite, or negative, which is DeepSpeed's sign for that in a gradient norm."""
    return None if math.isfinite(history[-1]) and history[-1] >= 0 else f"is {history[-1]:g}"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # `statistics.fmean` raises for infinities of both signs


_SLOWER = "lower the learning rate or make fewer updates per rollout"
_ANEW = "start a new run, which may have another learning rate, from a checkpoint before"
_NO_SEARCH = "the policy stops searching, read its trajectories and check what the reward pays for"

# The thresholds of `nothing_to_train_on` and `searches_fall` are set by hand, the others fitted to tiny policies. The
# loss would say no more than the gradient norm: if it is NaN, its gradient is.
DEFAULT_RULES = (
    Rule(
        "not_finite",
        "grad_norm",
        not_finite,
        f"the weights may be none either: {_ANEW} this step, and {_SLOWER}",
        at_once=True,
    ),
    Rule(
        "nothing_to_train_on",
        MASKED_METRIC,
        partial(level, threshold=1.0, patience=2),
        "the search engine answers no query, start it again and resume",
    ),
    Rule(
        "high_kl",
        "kl_to_old",
        partial(level, threshold=0.082, patience=2),
        f"{_SLOWER}, or set or lower `target_kl`",
    ),
    Rule("high_turn_ratio", "turns/ratio_max", partial(level, threshold=4.3, patience=2), _SLOWER),
    Rule(
        "reward_fall",
        "reward",
        partial(fall, share=0.62, minimum=0.1, window=3),
        f"{_ANEW} the fall, and {_SLOWER}",
    ),
    Rule(
        "searches_fall",
        "rollout/searches_per_trajectory",
        partial(fall, share=0.25, minimum=0.5, window=3),
        _NO_SEARCH,
    ),
)


@dataclass(frozen=True)
class Alarm:
    """A message that the condition of a rule has begun to hold."""

    rule: str
    """Its name."""
    step: int
    """The step of the log entry that raised it, which is the first entry after the judged iteration."""
    message: str


class CollapseDetector:
    """Judges each iteration by `rules` at the first log entry of the next one, and so never judges the last.

    Within an iteration, a metric is averaged over the entries that have it; for names that end in `_max`, the largest
    value counts. None and NaN count as absent, and an absent metric fires no rule. If every trajectory of an iteration
    was masked, no metric does, because the iteration says nothing about the policy.

    A rule fires when its condition begins to hold, and again only after the condition has ceased to hold. Rules must
    have different names.
    """

    def __init__(self, rules: Iterable[Rule] = DEFAULT_RULES) -> None:
        self.rules = tuple(rules)
        self._entries: list[Mapping[str, Any]] = []
        """The entries of the iteration that has begun."""
        self._history: dict[str, list[float]] = {rule.name: [] for rule in self.rules}
        self.holding: set[str] = set()
        """The rules that have fired and whose condition still holds. A rule that is removed may fire again."""

    def observe(self, entry: Mapping[str, Any]) -> list[Alarm]:
        """Read the next entry of a `log_history`, and return the alarms that it raises."""
        judged: list[tuple[Rule, Sequence[float]]] = []
        if ITERATION_METRIC in entry:
            judged += self._completed()
            self._entries.clear()
        self._entries.append(entry)
        norms = [(rule, entry.get(rule.metric)) for rule in self.rules if rule.at_once]
        judged += [(rule, [value]) for rule, value in norms if isinstance(value, int | float)]
        alarms = []
        for rule, history in judged:
            breach = rule.breach(history)
            if breach is None:
                self.holding.discard(rule.name)
            elif rule.name not in self.holding:
                self.holding.add(rule.name)
                step = int(entry["step"])
                message = f"{rule.name}: by step {step} `{rule.metric}` {breach}: {rule.hint}."
                alarms.append(Alarm(rule.name, step, message))
        return alarms

    def _completed(self) -> Iterator[tuple[Rule, Sequence[float]]]:
        """The rules whose metric the completed iteration has, with the metric of all iterations so far."""
        masked = _summary(MASKED_METRIC, self._entries) == 1.0
        for rule in self.rules:
            value = _summary(rule.metric, self._entries)
            if value is not None and not rule.at_once and (not masked or rule.metric == MASKED_METRIC):
                self._history[rule.name].append(value)
                yield rule, self._history[rule.name]


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
