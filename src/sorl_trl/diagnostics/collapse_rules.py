"""What a collapsing run looks like: rules on the metrics of docs/metrics.md."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Any

from sorl_trl.checks import POSITIVE_COUNT, Number, check_fields

MASKED_METRIC = "trajectories_without_turn"
"""Where it is 1, the other metrics are means over nothing: 0 or absent."""
TURNS_METRIC = "turns/per_trajectory"
"""Where it is 0, the ratios are means over nothing."""
RATIO_METRICS = ("turns/ratio_mean", "turns/ratio_min", "turns/ratio_max", "kl_to_old")


@dataclass(frozen=True)
class Rule(ABC):
    """A condition on one metric of docs/metrics.md. Rules look back only: at each iteration and those before it."""

    name: str
    metric: str
    hint: str
    """What to do about it: the end of the alarm's message."""
    from_outside: bool = field(default=False, kw_only=True)
    """Whether the cause lies outside of the policy, so that neither going back nor going slower helps."""

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def breach(self, history: Sequence[float]) -> str | None:
        """Say how the condition holds in the last iteration, if it does, given a value of each that has the metric."""


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

    It is not judged until the best is at least `minimum`, so that noise about 0 is no fall.
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
class Growth(Rule):
    """`metric` is at least `factor` times its median over the first `baseline` iterations, for `patience` in a row.

    Nor does a value below `minimum` count, so that small values can double.
    """

    factor: Annotated[float, Number(above=1)]
    minimum: float
    baseline: Annotated[int, POSITIVE_COUNT]
    patience: Annotated[int, POSITIVE_COUNT] = 1

    def breach(self, history: Sequence[float]) -> str | None:
        if len(history) < self.baseline + self.patience:
            return None
        usual = median(history[: self.baseline])
        threshold = max(self.factor * usual, self.minimum)
        if min(history[-self.patience :]) < threshold:
            return None
        return f"is {history[-1]:.4g}, grown from about {usual:.4g} to at least {threshold:.4g}"


@dataclass(frozen=True)
class NotFinite(Rule):
    """A log entry holds a number that is NaN or infinite. It is judged at once and by itself, not by its iteration.

    Of `loss` and of `metric`, the gradient norm, whatever is not finite counts; so does a negative norm, by which
    DeepSpeed says so. Of the ratios, infinity counts, and None where the entry has turns: that is what TRL logs for
    NaN, and, in every run, where there is nothing to average. A loss that is NaN is not in the log of its step unless
    `logging_nan_inf_filter` is off, but the gradient norm is.
    """

    def breach(self, history: Sequence[float]) -> str | None:
        return None  # `fault` has said it

    def fault(self, entry: Mapping[str, Any]) -> str | None:
        """Find the first metric of `entry` that is NaN or infinite, and what it is."""
        for name in ("loss", self.metric):
            value = entry.get(name)
            if isinstance(value, int | float) and (not math.isfinite(value) or (name == self.metric and value < 0)):
                return f"`{name}` is {value:g}"
        has_turns = (entry.get(TURNS_METRIC) or 0) > 0
        for name in RATIO_METRICS:
            value = entry.get(name)
            if value is None and name in entry and has_turns:
                return f"`{name}` is NaN"
            if isinstance(value, float) and not math.isfinite(value):
                return f"`{name}` is {value:g}"
        return None


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # `statistics.fmean` raises where infinities meet


_SLOWER = "lower the learning rate or make fewer updates per rollout"

# docs/stability.md says how often they catch a collapse, how often they are wrong, and how six of the thresholds were
# fitted. Those of `nothing_to_train_on`, `entropy_fall`, `groups_alike` and `searches_fall` are set by hand.
DEFAULT_RULES: tuple[Rule, ...] = (
    NotFinite(
        "not_finite",
        "grad_norm",
        f"the weights may be none either, go back to a checkpoint from before this step, and {_SLOWER}",
    ),
    Level(
        "nothing_to_train_on",
        MASKED_METRIC,
        "the search engine answers no query, start it again and resume",
        threshold=1.0,
        patience=2,
        from_outside=True,
    ),
    Level("high_kl", "kl_to_old", f"{_SLOWER}, or set or lower `target_kl`", threshold=0.082, patience=2),
    Level("high_clip_fraction", "clip_fraction/token", _SLOWER, threshold=0.62, patience=3),
    Level("high_turn_ratio", "turns/ratio_max", _SLOWER, threshold=4.3, patience=2),
    Fall("reward_fall", "reward", f"go back to before the fall, and {_SLOWER}", share=0.62, minimum=0.1, window=3),
    Growth("entropy_growth", "entropy", _SLOWER, factor=1.4, minimum=0.1, baseline=3, patience=2),
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
        minimum=0.91,
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
