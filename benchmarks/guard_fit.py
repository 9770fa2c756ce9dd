"""When rules would have fired in recorded runs, and which thresholds fit a budget of false alarms: pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.stability_statistics import Run, number
from sorl_trl.diagnostics import Rule, detect
from sorl_trl.diagnostics.collapse_rules import MASKED_METRIC

KEPT = 0.8
"""The least share of its best that a healthy run ends with."""
WINDOW = 3
"""Rollouts over which rewards are averaged to say when a collapse begins."""

Steps = NDArray[np.float64]
"""(runs,) the first alarm in each run, as the number of rollouts that were complete by then; infinity where none."""
Table = NDArray[np.float64]
"""(thresholds, runs) the same at several thresholds, from the one that fires most to the one that fires least."""


def onset(run: Run) -> int:
    """The rollout at which a collapse begins; the number of rollouts where training rewards do not show it."""
    rewards = run.metric("reward")
    means = [statistics.fmean(rewards[i - WINDOW : i]) for i in range(WINDOW, len(rewards) + 1)]
    begins = len(rewards)
    for i in reversed(range(1, len(means))):
        if means[i] >= max(means[0], max(means[:i]) / 2):
            break
        begins = i + WINDOW - 1
    return begins


def fate(run: Run) -> str:
    """What became of a run: "collapsed", "damaged" or "healthy"."""
    if run.collapsed:
        return "collapsed"
    return "damaged" if run.final("sampled_em") < KEPT * run.best else "healthy"


@dataclass(frozen=True)
class Outcomes:
    """What became of some runs, one entry each."""

    runs: Sequence[Run]
    fates: NDArray[np.str_]
    onsets: Steps

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Outcomes:
        return cls(runs, np.array([fate(run) for run in runs], str), np.array([onset(run) for run in runs], float))

    def where(self, chosen: NDArray[np.bool_]) -> Outcomes:
        return Outcomes([self.runs[i] for i in np.flatnonzero(chosen)], self.fates[chosen], self.onsets[chosen])

    def healthy(self) -> NDArray[np.bool_]:
        return self.fates == "healthy"

    def collapsed(self) -> NDArray[np.bool_]:
        return self.fates == "collapsed"


def log_history(run: Run) -> list[dict[str, Any]]:
    """As a guard would have seen it: an entry per rollout, its number as the step, and one that completes the last.

    An alarm's step is that of the entry with which it comes, the rollout after the one that it is about.
    """
    rows = [{name: number(value) for name, value in row.items()} for row in run.record["rollouts"]]
    rollouts = [{**row, "step": i} for i, row in enumerate(rows)]
    return [*rollouts, {"reward": 0.0, "step": len(rollouts)}]


def watch(rules: Sequence[Rule], runs: Sequence[Run]) -> dict[str, Steps]:
    """Rule to its first alarms, by the guard's own detector."""
    first = {rule.name: np.full(len(runs), math.inf) for rule in rules}
    for place, run in enumerate(runs):
        for alarm in reversed(detect(log_history(run), rules)):
            first[alarm.rule.name][place] = alarm.step
    return first


def any_of(steps: Iterable[Steps], count: int) -> Steps:
    """The first alarm of several rules, in each of `count` runs."""
    return np.min([np.full(count, math.inf), *steps], axis=0)


@dataclass(frozen=True)
class Template:
    """A rule but for its threshold; `thresholds` to try, from the one that fires most to the one that fires least."""

    rule: Callable[[float], Rule]
    thresholds: Sequence[float]


def history(run: Run, metric: str) -> tuple[list[int], list[float]]:
    """The rollouts in which a rule on the metric judges, and the values: as `CollapseDetector` takes them."""
    rows = enumerate(run.record["rollouts"])
    judged = [(i, row) for i, row in rows if metric == MASKED_METRIC or row.get(MASKED_METRIC) != 1.0]
    seen = [(i, number(row.get(metric))) for i, row in judged]
    known = [(i, value) for i, value in seen if value is not None]
    return [i for i, _ in known], [value for _, value in known]


def first_alarms(template: Template, runs: Sequence[Run]) -> Table:
    """(thresholds, runs) the first alarm at every threshold.

    With a threshold that fires less, the first alarm comes no earlier, so that a run is gone through once for all.
    """
    rules = [template.rule(threshold) for threshold in template.thresholds]
    table = np.full((len(rules), len(runs)), math.inf)
    for place, run in enumerate(runs):
        rollouts, values = history(run, rules[0].metric)
        seen = 1
        for row, rule in enumerate(rules):
            while seen <= len(values) and rule.breach(values[:seen]) is None:
                seen += 1
            if seen > len(values):
                break
            table[row, place] = rollouts[seen - 1] + 1
    return table


@dataclass(frozen=True)
class Count:
    """Of a set of rules, over some runs."""

    caught: int
    """Collapses in which it fires."""
    early: int
    """Collapses in which it fires before they begin."""
    false: int
    """Healthy runs in which it fires."""

    @property
    def score(self) -> int:
        """What thresholds are fitted for: a collapse counts once if it is caught, and again if before it begins."""
        return self.caught + self.early


def count(alarms: Steps, outcomes: Outcomes) -> Count:
    fired, collapsed = np.isfinite(alarms), outcomes.collapsed()
    early = (alarms < outcomes.onsets) & collapsed
    return Count(int((fired & collapsed).sum()), int(early.sum()), int((fired & outcomes.healthy()).sum()))


def fit_set(tables: Mapping[str, Table], fixed: Steps, outcomes: Outcomes, budget: float) -> dict[str, int | None]:
    """Choose the threshold of each rule of a set that may fire in a share `budget` of the healthy runs.

    Greedily: of all steps from one rule's threshold to one that fires more, or from none, the one that adds most to
    `Count.score` for each healthy run in which the set then fires too; until no step adds anything within the budget.
    Then each rule, in their order, takes the threshold that fires most of those with which the set fires in no more
    healthy runs: what a rule adds for nothing it shall add, in runs that are not like these too.

    Args:
        tables: rule to its `first_alarms`.
        fixed: the alarms (runs,) of the rules of the set that have no threshold to fit.
        outcomes: of the runs.
        budget: share of the healthy runs, from 0 to 1.

    Returns:
        Rule to a row of its table; `None` for a rule that is left out, because it fires in other healthy runs at
        every threshold.
    """
    most = int(budget * outcomes.healthy().sum() + 1e-9)
    chosen: dict[str, int | None] = dict.fromkeys(tables)
    while (step := _best_step(tables, chosen, fixed, outcomes, most)) is not None:
        name, row = step
        chosen[name] = row
    for name, table in tables.items():
        others = any_of([fixed, *alarms_at(tables, {**chosen, name: None})], len(fixed))
        limit = count(any_of([fixed, *alarms_at(tables, chosen)], len(fixed)), outcomes).false
        free = [row for row, alarms in enumerate(table) if count(np.minimum(others, alarms), outcomes).false <= limit]
        chosen[name] = min(free, default=None)
    return chosen


def _best_step(
    tables: Mapping[str, Table], chosen: Mapping[str, int | None], fixed: Steps, outcomes: Outcomes, most: int
) -> tuple[str, int] | None:
    """Rule and row of the step that `fit_set` takes next."""
    now = count(any_of([fixed, *alarms_at(tables, chosen)], len(fixed)), outcomes)
    steps: dict[tuple[str, int], tuple[float, int, int]] = {}
    for name, table in tables.items():
        others = any_of([fixed, *alarms_at(tables, {**chosen, name: None})], len(fixed))
        for row, alarms in enumerate(table[: chosen[name]]):
            then = count(np.minimum(others, alarms), outcomes)
            gain, cost = then.score - now.score, then.false - now.false
            if gain > 0 and then.false <= most:
                steps[name, row] = (gain / cost if cost else math.inf, gain, row)
    return max(steps, key=lambda step: steps[step], default=None)


def alarms_at(tables: Mapping[str, Table], chosen: Mapping[str, int | None]) -> list[Steps]:
    """The alarms of the rules that are not left out, each at its chosen threshold."""
    return [tables[name][row] for name, row in chosen.items() if row is not None]
