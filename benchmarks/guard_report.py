"""The page of `benchmarks.guard_rules`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.guard_curve import LEAD, WHOLE
from benchmarks.guard_fit import Outcomes, Steps, count
from benchmarks.guard_templates import FITTED
from benchmarks.other_methods import OTHER_METHODS

if TYPE_CHECKING:
    from benchmarks.guard_runs import Part

FATES = ("collapsed", "damaged", "healthy")
ALARMS = ("collapses caught", "before they begin", "damaged runs", "healthy runs", "precision", "median lead")
OTHERS = "methods of other sources, and on our defaults"
"""What came after the fit."""
Cells = Sequence[object]
THRESHOLDS_NOTE = """`CollapseGuard` has the thresholds in use; "fitted" is what the procedure finds in the runs that
there are now. Those by hand were chosen with all figures in view, judging seeds included, which flatters them; so the
guard took the fit as it was, also where it was near. Lead: rollouts between the alarm and the beginning of the
collapse, median over the caught; negative: after. Precision: the share of alarms that came in collapsed or damaged
runs."""
CURVE_NOTE = """Fitted on the choosing seeds for each budget of false alarms there; the figures are those of the
judging seeds, with 95 % bootstrap intervals over runs. The first rows are the whole set, the next ones a rule by
itself, the last ones the set with thresholds that were not fitted for a budget here."""
SHAPES_NOTE = """The set fitted again with one rule in another shape, and what it does on the choosing seeds. The
guard's own shape is bold; another would be taken if the set caught three collapses more."""


def table(header: Cells, rows: Sequence[Cells]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(map(str, cells)) + " |" for cells in lines] + [""]


def alarm_cells(alarms: Steps, outcomes: Outcomes) -> list[str]:
    """What alarms (runs,) came to, in the columns `ALARMS`."""
    fired = np.isfinite(alarms)
    of = {fate: f"{(fired & (outcomes.fates == fate)).sum()} of {(outcomes.fates == fate).sum()}" for fate in FATES}
    early = f"{count(alarms, outcomes).early} of {outcomes.collapsed().sum()}"
    precision = f"{1 - (fired & outcomes.healthy()).sum() / fired.sum():.2f}" if fired.any() else "–"
    lead = (outcomes.onsets - alarms)[outcomes.collapsed() & fired]
    median = f"{np.median(lead):g}" if len(lead) else "–"
    return [of["collapsed"], early, of["damaged"], of["healthy"], precision, median]


def _of_runs(seeds: str, part: Part) -> str:
    lost = part.outcomes.where(part.outcomes.collapsed()).runs
    of_seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in lost}))
    return f"- {len(part.outcomes.runs)} {seeds} runs, of which {len(lost)} collapse (seeds {of_seeds or 'none'})."


def expectations(judging: Part) -> Iterator[str]:
    """What a user may expect, in words."""
    outcomes, alarms = judging.outcomes, judging.sets["in use"]
    collapsed, healthy = outcomes.collapsed(), outcomes.healthy()
    now, lead = count(alarms, outcomes), (outcomes.onsets - alarms)[collapsed]
    unseen = sum(
        len(run.record["rollouts"]) == begins
        for run, begins, lost in zip(outcomes.runs, outcomes.onsets, collapsed, strict=True)
        if lost
    )
    caught, early = now.caught / collapsed.sum(), now.early / collapsed.sum()
    yield (
        f"Of {collapsed.sum()} runs of judging seeds that collapse, the rules in use see {now.caught} at some time, "
        f"{now.early} before the collapse begins, and {(lead >= LEAD).sum()} at least {LEAD} rollouts before. So "
        f"expect {caught:.0%} of collapses to be seen and {early:.0%} to be foreseen; the median lead is "
        f"{np.median(lead[np.isfinite(lead)]):g} rollouts (negative: after the beginning). Half of the "
        f"collapses begin within {np.median(outcomes.onsets[collapsed]):g} rollouts, when few rules can judge yet."
    )
    yield ""
    yield (
        f"There is an alarm in {now.false} of {healthy.sum()} healthy runs. {_where_false(judging)} Most judging runs "
        "train at one learning rate for all methods, which is high for some; choosing runs have lower ones too. So "
        "the budget of the fit is no promise for other runs."
    )
    yield ""
    yield (
        f"In {unseen} of the collapsed runs the training reward does not show the collapse: an alarm in them counts "
        "as before. Runs of a seed start from the same policy, so that the intervals, over runs, are rather narrow."
    )
    yield ""


def _where_false(judging: Part) -> str:
    """The share of healthy runs with an alarm by regime, highest first."""
    outcomes, fired = judging.outcomes, np.isfinite(judging.sets["in use"])
    regimes = np.array([run.record["regime"] for run in outcomes.runs])
    shares = {str(name): fired[outcomes.healthy() & (regimes == name)] for name in dict.fromkeys(regimes)}
    found = sorted((float(of.mean()), name) for name, of in shares.items() if len(of))
    return "By regime: " + ", ".join(f"{name} {share:.0%}" for share, name in reversed(found)) + "."


def threshold_rows(found: Mapping[str, Any]) -> Iterator[Cells]:
    for name, field in FITTED.items():
        limits = found["thresholds"][name]
        shown = ["–" if limits[key] is None else f"{limits[key]:g}" for key in ("by hand", "fitted", "in use")]
        yield [f"`{name}`", field, *shown]


def by_part(judging: Part, titles: Mapping[str, tuple[str, str]]) -> Iterator[Cells]:
    """The rules in use, in each world, in each regime, and with the methods that no fit has seen."""
    outcomes, alarms = judging.outcomes, judging.sets["in use"]
    parts = {
        f"{word}: {title}": np.array([titles[run.record["regime"]][place] == title for run in outcomes.runs])
        for place, word in enumerate(("world", "regime"))
        for title in dict.fromkeys(title[place] for title in titles.values())
    }
    parts[OTHERS] = np.array([run.record["method"] in OTHER_METHODS for run in outcomes.runs])
    for name, chosen in parts.items():
        if chosen.any():
            yield [name, *alarm_cells(alarms[chosen], outcomes.where(chosen))]


def _share(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return "–"
    low, high = estimate["interval"] or (float("nan"),) * 2
    return f"{estimate['value']:.1%} [{low:.1%}, {high:.1%}]"


def _rollouts(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return "–"
    return f"{estimate['value']:g}" + (" [{:g}, {:g}]".format(*estimate["interval"]) if estimate["interval"] else "")


def curve_rows(found: Mapping[str, Any]) -> Iterator[Cells]:
    for row in found["curve"]:
        name = f"**{WHOLE}**" if row["rules"] == WHOLE else f"`{row['rules']}`"
        yield [name, f"{row['budget']:.1%}", *_judged(row)]
    for title, row in found["judged"].items():
        yield [f"**{WHOLE}, {title}**", "", *_judged(row)]


def _judged(row: Mapping[str, Any]) -> list[str]:
    shares = [_share(row[key]) for key in ("caught", "early", "in_time")]
    return [*shares, _rollouts(row["median_lead"]), _share(row["false_alarms"])]


def shape_rows(shapes: Sequence[Mapping[str, Any]]) -> Iterator[Cells]:
    for row in shapes:
        fields = ", ".join(f"{name} {value}" for name, value in row["shape"].items())
        limit = "–" if row["threshold"] is None else f"{row['threshold']:g}"
        done = [getattr(row["count"], name) for name in ("caught", "early", "false")]
        yield [
            f"`{row['rule']}`",
            f"**{fields}**" if row["own"] else fields,
            limit,
            *done,
        ]


def report(
    choosing: Part,
    judging: Part,
    found: Mapping[str, Any],
    shapes: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    titles: Mapping[str, tuple[str, str]],
) -> str:
    """Everything under the page's introduction."""
    lines = ["## What to expect", "", *map(_of_runs, ("choosing", "judging"), (choosing, judging)), ""]
    lines += expectations(judging)
    lines += ["## Thresholds", "", *table(["rule", "field", "by hand", "fitted", "in use"], [*threshold_rows(found)])]
    lines += [THRESHOLDS_NOTE, ""]
    sets = [
        [f"{seeds} seeds: thresholds {title}", *alarm_cells(alarms, part.outcomes)]
        for seeds, part in (("choosing", choosing), ("judging", judging))
        for title, alarms in part.sets.items()
    ]
    lines += table(["any of the rules", *ALARMS], sets)
    lines += ["## Lead time and false alarms", "", CURVE_NOTE, "", "![curves](guard_rules.png)", ""]
    header = [
        "rules",
        "budget",
        "caught",
        "before they begin",
        f"{LEAD} rollouts before",
        "median lead",
        "false alarms",
    ]
    lines += table(header, [*curve_rows(found)])
    own = [[f"`{name}`", *alarm_cells(alarms, judging.outcomes)] for name, alarms in judging.own.items()]
    lines += ["## The rules in use, one by one, on the judging seeds", "", *table(["rule", *ALARMS], own)]
    lines += [
        "## Any of the rules in use, on the judging seeds",
        "",
        *table(["", *ALARMS], [*by_part(judging, titles)]),
    ]
    lines += ["## Other shapes", "", SHAPES_NOTE, ""]
    lines += table(["rule", "shape", "threshold", "caught", "before they begin", "false"], [*shape_rows(shapes)])
    rows = [
        [f"{row['rule']}, {row['threshold']:g}", seeds, *alarm_cells(row[seeds], part.outcomes)]
        for row in others
        for seeds, part in (("choosing", choosing), ("judging", judging))
    ]
    lines += ["## Rules that the guard has not", "", "Each fitted by itself, for the whole budget.", ""]
    return "\n".join([*lines, *table(["rule", "seeds", *ALARMS], rows)])
