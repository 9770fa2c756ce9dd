"""What methods reach with the same number of generated tokens, from the logs of their runs."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the tokens that the shortest of the compared runs generates."""
WINDOW = 5
"""Rollouts whose reward is averaged: those that end last within the budget."""

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""The 97.5 % quantile of Student's t for 1, 2, … degrees of freedom; more of them take the last, which is wider."""


@dataclass(frozen=True)
class Curve:
    """The rollouts of a run in order: tokens that the policy had generated after each, and their mean reward."""

    tokens: list[float]
    rewards: list[float]

    def reward_at(self, budget: float) -> float:
        """The mean reward of the last `WINDOW` rollouts that `budget` tokens pay for; NaN where it pays for none."""
        end = bisect_right(self.tokens, budget)
        return statistics.fmean(self.rewards[max(0, end - WINDOW) : end]) if end else math.nan


def curve_of(log: Sequence[Mapping[str, Any]], trajectories: int) -> Curve:
    """From a trainer's log, in which a rollout's metrics stand at its first update.

    Args:
        log: `trainer.state.log_history`.
        trajectories: per rollout.
    """
    tokens: list[float] = []
    rewards: list[float] = []
    for entry in log:
        if entry.get("rollout/tokens_per_turn") is not None:
            per_trajectory = entry["rollout/turns_per_trajectory"] * entry["rollout/tokens_per_turn"]
            tokens.append(trajectories * per_trajectory + (tokens[-1] if tokens else 0.0))
            rewards.append(entry["reward"])
    return Curve(tokens, rewards)


@dataclass(frozen=True)
class Difference:
    """How far a method is ahead of another, paired by seed."""

    mean: float
    interval: tuple[float, float]
    """95 %, of Student's t; NaN with one seed."""


def difference_of(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """The mean difference of two methods' figures, in the same order of seeds."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Difference(mean, (math.nan, math.nan))
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    reach = STUDENT[min(len(differences) - 1, len(STUDENT)) - 1] * error
    return Difference(mean, (mean - reach, mean + reach))


def budget_table(curves: Mapping[str, Sequence[Curve]], baseline: str) -> str:
    """Markdown: each method's reward at each budget, and how far it is ahead of `baseline` there.

    Args:
        curves: of each method, one per seed, in the same order of seeds.
        baseline: one of the methods.
    """
    budgets = [share * min(curve.tokens[-1] for runs in curves.values() for curve in runs) for share in SHARES]
    lines = ["| method | " + " | ".join(f"{budget:,.0f} tokens" for budget in budgets) + " |"]
    lines.append("|---" * (len(budgets) + 1) + "|")
    for method, runs in curves.items():
        cells = []
        for budget in budgets:
            ours, theirs = ([run.reward_at(budget) for run in each] for each in (runs, curves[baseline]))
            ahead = difference_of(ours, theirs)
            low, high = ahead.interval
            difference = f" ({ahead.mean:+.3f}, {low:+.3f} to {high:+.3f})" if method != baseline else ""
            cells.append(f"{statistics.fmean(ours):.3f}{difference}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
