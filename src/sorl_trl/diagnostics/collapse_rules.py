"""Rules on the metrics of docs/metrics.md that tell a collapsing run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from sorl_trl.checks import POSITIVE_COUNT, Number, check_fields

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
