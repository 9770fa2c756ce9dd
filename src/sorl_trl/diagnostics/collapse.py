"""Tells a collapsing run from the metrics of docs/metrics.md: rules, and their application to log entries."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from sorl_trl.checks import POSITIVE_COUNT, Number, check_fields

ITERATION_METRIC = "reward"
"""TRL logs this metric on the steps that generate, so an iteration lasts from one entry that has it to the next."""
MASKED_METRIC = "trajectories_without_turn"
"""If this metric is 1, the other metrics are means over nothing: 0 or absent."""


@dataclass(frozen=True)
class Rule(ABC):
    """A condition on one metric of docs/metrics.md, at an iteration and those before it."""

    name: str
    metric: str
    hint: str
    """Advice, which ends the alarm's message."""

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def breach(self, history: Sequence[float]) -> str | None:
        """Describe how the condition holds in the last iteration, if it does, given the metric of each iteration."""


@dataclass(frozen=True)
class Level(Rule):
    """`metric` is at least `threshold` for `patience` iterations in a row."""

    threshold: float
    patience: Annotated[int, POSITIVE_COUNT] = 1

    def breach(self, history: Sequence[float]) -> str | None:
        last = history[-self.patience :]
        if len(last) < self.patience or min(last) < self.threshold:
            return None
        return f"is {last[-1]:.4g}, at or above {self.threshold:.4g}"


@dataclass(frozen=True)
class Fall(Rule):
    """The mean of `metric` over `window` iterations is below `share` of the best such mean so far.

    It is not judged until the best mean is at least `minimum`, so that noise around 0 does not count as a fall.
    """

    share: Annotated[float, Number(above=0, below=1)]
    minimum: Annotated[float, Number(above=0)]
    window: Annotated[int, POSITIVE_COUNT] = 1

    def breach(self, history: Sequence[float]) -> str | None:
        means = [mean(history[i - self.window : i]) for i in range(self.window, len(history) + 1)]
        best = max(filter(math.isfinite, means), default=-math.inf)
        if best < self.minimum or not means[-1] < self.share * best:
            return None
        return f"is {means[-1]:.4g}, fallen from a best of {best:.4g} to below {self.share * best:.4g}"


@dataclass(frozen=True)
class NotFinite(Rule):
    """`metric`, the gradient norm, is NaN or infinite, or negative, which is DeepSpeed's sign for that.

    Each log entry is judged at once, by itself. The loss would say no more: if it is NaN, its gradient is.
    """

    def breach(self, history: Sequence[float]) -> str | None:
        last = history[-1]
        return None if math.isfinite(last) and last >= 0 else f"is {last:g}"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # `statistics.fmean` raises for infinities of both signs


_SLOWER = "lower the learning rate or make fewer updates per rollout"
_ANEW = "start a new run, which may have another learning rate, from a checkpoint before"

# The thresholds of `nothing_to_train_on` and `searches_fall` are set by hand, the others fitted to tiny policies.
DEFAULT_RULES: tuple[Rule, ...] = (
    NotFinite(
        "not_finite",
        "grad_norm",
        f"the weights may be none either: {_ANEW} this step, and {_SLOWER}",
    ),
    Level(
        "nothing_to_train_on",
        MASKED_METRIC,
        "the search engine answers no query, start it again and resume",
        threshold=1.0,
        patience=2,
    ),
    Level("high_kl", "kl_to_old", f"{_SLOWER}, or set or lower `target_kl`", threshold=0.082, patience=2),
    Level("high_turn_ratio", "turns/ratio_max", _SLOWER, threshold=4.3, patience=2),
    Fall("reward_fall", "reward", f"{_ANEW} the fall, and {_SLOWER}", share=0.62, minimum=0.1, window=3),
    Fall(
        "searches_fall",
        "rollout/searches_per_trajectory",
        "the policy stops searching, read its trajectories and check what the reward pays for",
        share=0.25,
        minimum=0.5,
        window=3,
    ),
)


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
