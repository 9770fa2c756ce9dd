"""What a budget of false alarms buys: rules fitted for several budgets on some runs, and judged on others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.guard_fit import Outcomes, Steps, Table, alarms_at, any_of, fit_set
from benchmarks.seed_statistics import bootstrap_interval
from benchmarks.stability_figures import BASELINE, COLOURS, new_figure, tidy

BUDGETS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Shares of the healthy choosing runs in which a set may fire."""
SINGLES = ("reward_fall", "high_kl", "entropy_growth")
"""Rules that are also fitted by themselves, for the whole budget."""
WHOLE = "all rules"
LEAD = 2
"""Rollouts that leave time to act."""
PANELS = {
    "caught": "caught at all",
    "early": "caught before they begin",
    "in_time": f"caught {LEAD} rollouts before, or earlier",
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Tables:
    """The alarms of a set of rules in some runs: `fitted`, at every threshold; `fixed`, of the rules without one."""

    fitted: Mapping[str, Table]
    fixed: Steps
    outcomes: Outcomes

    def alarms(self, chosen: Mapping[str, int | None]) -> Steps:
        """The first alarm of the set."""
        return any_of([self.fixed, *alarms_at(self.fitted, chosen)], len(self.fixed))

    def only(self, name: str) -> Tables:
        """The one rule."""
        return Tables({name: self.fitted[name]}, np.full_like(self.fixed, np.inf), self.outcomes)


def achieved(alarms: Steps, outcomes: Outcomes) -> Row:
    """What alarms (runs,) were worth: shares, and the median lead of the caught, each with its 95 % interval.

    `caught`, `early` and `in_time` are shares of the collapses, `false_alarms` of the healthy runs; `median_lead` is
    in rollouts, negative where the alarm came after the beginning. `None` where there is nothing to take a share of.
    """
    collapsed = outcomes.collapsed()
    lead = (outcomes.onsets - alarms)[collapsed]
    return {
        "caught": _estimate(np.isfinite(lead)),
        "early": _estimate(lead > 0),
        "in_time": _estimate(lead >= LEAD),
        "median_lead": _estimate(lead[np.isfinite(lead)], np.median),
        "false_alarms": _estimate(np.isfinite(alarms[outcomes.healthy()])),
    }


def _estimate(values: Any, statistic: Any = np.mean) -> Row | None:
    if not len(values):
        return None
    return {"value": float(statistic(values)), "interval": bootstrap_interval(values, statistic)}


def curve(choosing: Tables, judging: Tables, thresholds: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    """A row for each budget, of the set and of each of `SINGLES`."""
    for name in (WHOLE, *SINGLES):
        fits, judges = (tables if name == WHOLE else tables.only(name) for tables in (choosing, judging))
        for budget in BUDGETS:
            chosen = fit_set(fits.fitted, fits.fixed, fits.outcomes, budget)
            found = {rule: None if row is None else thresholds[rule][row] for rule, row in chosen.items()}
            figures = achieved(judges.alarms(chosen), judges.outcomes)
            yield {"rules": name, "budget": budget, "thresholds": found, **figures}


def draw_curve(rows: Sequence[Row], sets: Mapping[str, Row], path: Path) -> None:
    """Collapses that are caught against healthy runs with an alarm: a panel per `PANELS`, a line per rule.

    Args:
        rows: of `curve`.
        sets: title to what `achieved` says of rules that are not fitted here, each a mark.
        path: of the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(12, 4.4)
    axes = figure.subplots(1, len(PANELS), sharex=True, sharey=True)
    for axis, (key, title) in zip(axes, PANELS.items(), strict=True):
        for name, colour in zip((WHOLE, *SINGLES), (BASELINE, *COLOURS), strict=False):
            _draw_line(axis, [row for row in rows if row["rules"] == name], key, colour)
        for marker, (label, row) in zip("D*", sets.items(), strict=False):
            point = (100 * row["false_alarms"]["value"], 100 * row[key]["value"])
            axis.plot(*point, marker, color=COLOURS[4], markersize=9, label=label, zorder=4, linestyle="none")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("healthy runs with an alarm, %", fontsize=9)
        tidy(axis)
    axes[0].set_ylabel("collapses, %", fontsize=9)
    axes[0].set_ylim(-2, 102)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.suptitle("Alarms in runs of judging seeds, fitted for budgets of 0 to 20 % on choosing seeds", fontsize=12)
    figure.savefig(path, dpi=90)


def _draw_line(axis: Any, rows: Sequence[Row], key: str, colour: str) -> None:
    """With a band of its intervals, for the set alone."""
    name, across = rows[0]["rules"], [100 * row["false_alarms"]["value"] for row in rows]
    whole = name == WHOLE
    if whole:
        low, high = zip(*(row[key]["interval"] for row in rows), strict=True)
        axis.fill_between(across, 100 * np.array(low), 100 * np.array(high), color=colour, alpha=0.13, linewidth=0)
    style = {"linewidth": 2.4 if whole else 1.4, "zorder": 3 if whole else 2}
    heights = [100 * row[key]["value"] for row in rows]
    axis.plot(across, heights, marker="o", markersize=3.5, color=colour, label=name, **style)
