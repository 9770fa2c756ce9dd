"""Which alarms tell of a collapse, how early, and how often falsely?

    python -m benchmarks.guard_rules

Reads the runs of the stability benchmark (`benchmarks/results/stability_runs.jsonl.xz`). For each template of a rule
it takes, on the choosing seeds, the threshold that catches most collapses while it fires in at most 5 % of the healthy
runs. What that rule and those of `CollapseGuard` do on the judging seeds is in `benchmarks/results/guard_rules.md`.
The thresholds of `CollapseGuard` were chosen by hand with all these figures in view, which flatters them.

A run's collapse is that of the stability benchmark; one that ends below four fifths of its best evaluation is damaged,
and the others are healthy. A collapse begins with the rollout from which on, to the end, the mean training reward of
the last three rollouts is below that of the first three or below half of the best such mean before.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.stability import load
from benchmarks.stability_grid import CHOOSING_SEEDS, JUDGING_SEEDS
from benchmarks.stability_statistics import Run, published_grid, read_runs
from sorl_trl.diagnostics.collapse_detector import DEFAULT_RULES, Fall, Growth, Level, Rule, detect

RESULT = Path(__file__).parent / "results/guard_rules.md"
FALSE_ALARMS = 0.05
"""Most of the healthy choosing runs in which a rule may fire."""
KEPT = 0.8
"""The least share of its best that a healthy run ends with."""
WINDOW = 3
"""Rollouts over which rewards are averaged to say when a collapse begins."""

Candidates = tuple[str, Callable[[float], Rule], Sequence[float]]
"""Name of a template, the rule with a threshold, and the thresholds to try."""


def log_history(run: Run) -> list[dict[str, Any]]:
    """As a guard would have seen it: an entry per rollout, its number as the step, and one that completes the last.

    An alarm's step is that of the entry with which it comes, the rollout after the one that it is about.
    """
    rollouts = [{**row, "step": i} for i, row in enumerate(run.record["rollouts"])]
    return [*rollouts, {"reward": 0.0, "step": len(rollouts)}]


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
class Verdict:
    """What a rule did over some runs."""

    runs: Counter[str]
    """By their fate."""
    fired: Counter[str]
    """In how many of them it fired at all."""
    early: int
    """Of the collapsed: fired before the collapse began."""
    lead: float | None
    """Median of the rollouts between the alarm and the beginning of the collapse, over the caught; negative: after."""

    @property
    def precision(self) -> float | None:
        """The share of alarms that came in collapsed or damaged runs."""
        return 1 - self.fired["healthy"] / self.fired.total() if self.fired else None


def judge(rules: Sequence[Rule], runs: Iterable[Run]) -> Verdict:
    """What it would have done to watch for any of the rules."""
    leads = []
    fates: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    for run in runs:
        fates[fate(run)] += 1
        if alarms := detect(log_history(run), rules):
            fired[fate(run)] += 1
            if run.collapsed:
                leads.append(onset(run) - alarms[0].step)
    early = sum(lead > 0 for lead in leads)
    return Verdict(fates, fired, early, statistics.median(leads) if leads else None)


def levels(metric: str, runs: Sequence[Run], side: str = "above") -> list[Candidates]:
    """Templates of a level with 1 to 3 rollouts of patience, thresholds from the metric's own quantiles."""
    values = sorted(value for run in runs for value in run.metric(metric))
    if len(values) < 50:
        return []
    quantiles = sorted({float(f"{values[len(values) * q // 100]:.2g}") for q in range(2, 99, 2)})

    def template(patience: int) -> Candidates:
        def rule(threshold: float) -> Rule:
            return Level(metric, metric, "", threshold=threshold, side=side, patience=patience)

        return f"{metric} {side}, {patience} in a row", rule, quantiles

    return [template(patience) for patience in (1, 2, 3)]


def falls(metric: str, minimum: float) -> list[Candidates]:
    def template(window: int) -> Candidates:
        def rule(share: float) -> Rule:
            return Fall(metric, metric, "", share=share, minimum=minimum, window=window)

        return f"{metric} below a share of its best, mean of {window}", rule, [i / 20 for i in range(2, 20)]

    return [template(window) for window in (1, 3)]


def growths(metric: str) -> list[Candidates]:
    def template(patience: int) -> Candidates:
        def rule(factor: float) -> Rule:
            return Growth(metric, metric, "", factor=factor, minimum=0.0, baseline=2, patience=patience)

        factors = [1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0]
        return f"{metric} times its first two, {patience} in a row", rule, factors

    return [template(patience) for patience in (1, 2)]


def templates(runs: Sequence[Run]) -> list[Candidates]:
    above = ("kl_to_old", "clip_fraction/token", "clip_fraction/turn", "turns/ratio_max", "grad_norm")
    found = [candidates for metric in above for candidates in levels(metric, runs)]
    found += levels("turns/ratio_min", runs, "below")
    found += levels("rollout/invalid_actions_per_trajectory", runs)
    for metric in ("entropy", "kl_to_old", "clip_fraction/token", "rollout/invalid_actions_per_trajectory"):
        found += growths(metric)
    found += falls("reward", 0.1) + falls("rollout/searches_per_trajectory", 0.5) + falls("entropy", 0.01)
    return found


def fit(candidates: Candidates, runs: Sequence[Run]) -> Rule | None:
    """The threshold that catches most collapses among those with few false alarms; none if it catches nothing."""
    _, template, thresholds = candidates
    verdicts = {threshold: judge([template(threshold)], runs) for threshold in thresholds}
    allowed = {t: v.fired for t, v in verdicts.items() if v.fired["healthy"] <= FALSE_ALARMS * v.runs["healthy"]}
    allowed = {t: fired for t, fired in allowed.items() if fired["collapsed"]}
    if not allowed:
        return None
    best = max(allowed, key=lambda t: (allowed[t]["collapsed"], verdicts[t].early, -allowed[t]["healthy"]))
    return template(best)


def row(name: str, threshold: float | None, verdict: Verdict) -> str:
    precision = "–" if verdict.precision is None else f"{verdict.precision:.2f}"
    lead = "–" if verdict.lead is None else f"{verdict.lead:g}"
    limit = "" if threshold is None else f"{threshold:g}"
    of = {fate: f"{verdict.fired[fate]} of {verdict.runs[fate]}" for fate in ("collapsed", "damaged", "healthy")}
    early = f"{verdict.early} of {verdict.runs['collapsed']}"
    cells = [name, limit, of["collapsed"], early, of["damaged"], of["healthy"], precision, lead]
    return "| " + " | ".join(cells) + " |"


def threshold_of(rule: Rule) -> float | None:
    for name in ("threshold", "share", "factor"):
        if hasattr(rule, name):
            return float(getattr(rule, name))
    return None


TABLE = """| rule | threshold | collapses caught | before they began | damaged runs | healthy runs | precision | lead |
|---|---|---|---|---|---|---|---|"""


def report(runs: Sequence[Run]) -> str:
    chose = [run for run in runs if run.seed in CHOOSING_SEEDS]
    judges = [run for run in runs if run.seed in JUDGING_SEEDS]
    fitted: dict[str, Rule] = {}
    for candidates in templates(chose):
        if (rule := fit(candidates, chose)) is not None:
            fitted[candidates[0]] = replace(rule, name=candidates[0])
    lines = ["# Which alarms tell of a collapse", "", __doc__.strip() if __doc__ else "", ""]
    lines += [f"{len(chose)} choosing and {len(judges)} judging runs. Lead: rollouts, median over the caught.", ""]
    lines += ["## CollapseGuard's own rules, on the judging seeds", "", TABLE]
    lines += [row(rule.name, threshold_of(rule), judge([rule], judges)) for rule in DEFAULT_RULES]
    lines += [row("**any of them**", None, judge(DEFAULT_RULES, judges))]
    for regime in dict.fromkeys(run.record["regime"] for run in judges):
        part = [run for run in judges if run.record["regime"] == regime]
        lines += [row(f"any of them, {regime}", None, judge(DEFAULT_RULES, part))]
    lines += [""]
    for title, part in (("the choosing seeds, which fitted them", chose), ("the judging seeds", judges)):
        lines += [f"## Fitted rules, on {title}", "", TABLE]
        lines += [row(name, threshold_of(rule), judge([rule], part)) for name, rule in fitted.items()]
        lines += [""]
    return "\n".join(lines)


def main() -> None:
    runs = read_runs(load(), published_grid())
    text = report(runs)
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
