"""Which rules of a collapsing run hold, from log entries alone: while it trains, or of a run that is over."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

ITERATION_METRIC = "reward"
"""TRL logs it on the steps that generate: an iteration lasts from one entry that has it to the next."""
MASKED_METRIC = "trajectories_without_turn"
"""Where it is 1, the other metrics are means over nothing: 0 or absent."""


class Breach(NamedTuple):
    """A rule's condition, where it holds."""

    value: float
    """What was compared: the metric in one iteration, or its moving average."""
    threshold: float
    side: str
    """Where `value` is relative to `threshold`, in words."""


@dataclass(frozen=True)
class Rule(ABC):
    """A condition on one metric of docs/metrics.md. Rules look back only: at each iteration and those before it."""

    name: str
    metric: str
    hint: str
    """What to do about it: the end of the alarm's message."""
    from_outside: bool = field(default=False, kw_only=True)
    """Whether the cause lies outside of the policy, so that neither going back nor going slower helps."""

    @abstractmethod
    def breach(self, history: Sequence[float]) -> Breach | None:
        """Whether the condition holds in the last of the iterations that have the metric, one value for each."""

    def _require(self, holds: bool, name: str, allowed: str) -> None:
        if not holds:
            raise ValueError(f"`{name}` of rule {self.name!r} is {getattr(self, name)!r}, but must be {allowed}.")


@dataclass(frozen=True)
class Level(Rule):
    """`metric` is `side` `threshold`, or equal to it, for `patience` iterations in a row."""

    threshold: float
    side: str = "above"
    patience: int = 1

    def __post_init__(self) -> None:
        self._require(self.side in ("above", "below"), "side", "'above' or 'below'")
        self._require(self.patience >= 1, "patience", "at least 1")

    def breach(self, history: Sequence[float]) -> Breach | None:
        sign = 1 if self.side == "above" else -1
        held = len(history) >= self.patience and all(
            sign * value >= sign * self.threshold for value in history[-self.patience :]
        )
        return Breach(history[-1], self.threshold, f"at or {self.side}") if held else None


@dataclass(frozen=True)
class Fall(Rule):
    """The mean of `metric` over `window` iterations is below `share` of the best such mean so far.

    It is not judged until the best is at least `minimum`, so that noise about 0 is no fall.
    """

    share: float
    minimum: float
    window: int = 1

    def __post_init__(self) -> None:
        self._require(0 < self.share < 1, "share", "between 0 and 1")
        self._require(self.minimum > 0, "minimum", "above 0")
        self._require(self.window >= 1, "window", "at least 1")

    def breach(self, history: Sequence[float]) -> Breach | None:
        means = [_mean(history[i - self.window : i]) for i in range(self.window, len(history) + 1)]
        best = max(filter(math.isfinite, means), default=-math.inf)
        if best < self.minimum or not means[-1] < self.share * best:
            return None
        return Breach(means[-1], self.share * best, f"fallen from a best of {best:.4g} to below")


@dataclass(frozen=True)
class Growth(Rule):
    """`metric` is at least `factor` times its median over the first `baseline` iterations, for `patience` in a row.

    Nor does a value below `minimum` count, so that small values can double.
    """

    factor: float
    minimum: float
    baseline: int
    patience: int = 1

    def __post_init__(self) -> None:
        self._require(self.factor > 1, "factor", "above 1")
        self._require(self.baseline >= 1, "baseline", "at least 1")
        self._require(self.patience >= 1, "patience", "at least 1")

    def breach(self, history: Sequence[float]) -> Breach | None:
        if len(history) < self.baseline + self.patience:
            return None
        usual = median(history[: self.baseline])
        threshold = max(self.factor * usual, self.minimum)
        if not all(value >= threshold for value in history[-self.patience :]):
            return None
        return Breach(history[-1], threshold, f"grown from about {usual:.4g} to at least")


@dataclass(frozen=True)
class Alarm:
    """A rule whose condition has begun to hold."""

    rule: Rule
    iteration: int
    """The iteration that was judged, from 0."""
    step: int
    """Of the log entry after it, with which it was complete."""
    value: float
    threshold: float
    message: str


_SLOWER = "lower the learning rate or make fewer updates per rollout"

# How often they catch a collapse, and how often they are wrong: benchmarks/results/guard_rules.md. Of what
# `nothing_to_train_on`, `entropy_fall`, `groups_alike` and `searches_fall` watch for, its runs saw next to nothing.
DEFAULT_RULES: tuple[Rule, ...] = (
    Level(
        "nothing_to_train_on",
        MASKED_METRIC,
        "the search engine answers no query, start it again and resume",
        threshold=1.0,
        patience=2,
        from_outside=True,
    ),
    Level("high_kl", "kl_to_old", f"{_SLOWER}, or set or lower `target_kl`", threshold=0.2, patience=2),
    Level("high_clip_fraction", "clip_fraction/token", _SLOWER, threshold=0.25, patience=3),
    Level("high_turn_ratio", "turns/ratio_max", _SLOWER, threshold=4.0, patience=2),
    Fall("reward_fall", "reward", f"go back to before the fall, and {_SLOWER}", share=0.65, minimum=0.1, window=3),
    Growth("entropy_growth", "entropy", _SLOWER, factor=1.3, minimum=0.1, baseline=3, patience=2),
    Fall(
        "entropy_fall",
        "entropy",
        "trajectories of a group hardly differ any more, set `entropy_coef`",
        share=0.02,
        minimum=0.1,
        window=2,
    ),
    # Growth, not Level: without groups (`num_generations=1`) it is always 1.
    Growth(
        "groups_alike",
        "frac_reward_zero_std",
        "hardly any group has rewards to compare, choose other questions or raise `num_generations`",
        factor=1.5,
        minimum=0.95,
        baseline=5,
        patience=3,
    ),
    Growth(
        "invalid_actions",
        "rollout/invalid_actions_per_trajectory",
        f"the policy forgets the protocol, {_SLOWER}",
        factor=3.0,
        minimum=0.3,
        baseline=3,
        patience=2,
    ),
    Fall(
        "searches_fall",
        "rollout/searches_per_trajectory",
        "the policy stops searching, read its trajectories and check what the reward pays for",
        share=0.25,
        minimum=0.5,
        window=3,
    ),
)


class CollapseDetector:
    """Judges each iteration by `rules` when it is complete, with the first log entry of the next one: never the last.

    Within an iteration, a metric is averaged over the entries that have it; of names that end in `_max` or `_min` the
    largest or smallest value is taken. None and NaN count as absent, and a metric that is absent fires nothing. So do
    all others where every trajectory was masked: that iteration says nothing about the policy.

    A rule fires when its condition begins to hold, and again only after the condition has not held once.

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
        """Take the next entry of a `log_history`; the alarms of the iteration that it completes."""
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
        return alarms

    def _judge(self, step: int) -> list[Alarm]:
        self.judged.append(len(self.starts) - 1)
        new = {metric: _summary(metric, values) for metric, values in self._values.items() if values}
        if new.get(MASKED_METRIC) == 1.0:
            new = {MASKED_METRIC: 1.0}
        for metric in new.keys() & self._history.keys():
            self._history[metric].append(new[metric])
        return [alarm for rule in self.rules if rule.metric in new and (alarm := self._apply(rule, step))]

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
    return min(values) if metric.endswith("_min") else _mean(values)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # `statistics.fmean` raises where infinities meet


def detect(log_history: Iterable[Mapping[str, Any]], rules: Iterable[Rule] = DEFAULT_RULES) -> list[Alarm]:
    """All alarms of a recorded run, as they would have come while it trained.

    Args:
        log_history: `trainer.state.log_history`, or that of a `trainer_state.json`.
        rules: as for `CollapseDetector`.
    """
    detector = CollapseDetector(rules)
    return [alarm for entry in log_history for alarm in detector.observe(entry)]
