"""Which alarms tell of a collapse, how early, and how often falsely?

    python -m benchmarks.guard_rules

Reads every run of the stability benchmark, of its trials and of the turn-length benchmark: their archives and
`runs/stability`. Runs of the choosing seeds fit the thresholds of the rules of `CollapseGuard`, as a set that may fire
in at most 5 % of the healthy ones; runs of the judging seeds say what these rules are worth. Writes
`benchmarks/results/guard_rules.md`, `.json` and `.png`.

A run's collapse is that of the stability benchmark: it ends below its start or below half of its best evaluation. One
that ends below four fifths of its best is damaged, and the others are healthy. A collapse begins with the rollout from
which on, to the end, the mean training reward of the last three rollouts is below that of the first three or below
half of the best such mean before.

The fit goes by greedy steps. Of all steps from one rule's threshold to one that fires more, it takes the one that adds
most for each healthy run in which the set then fires too, until no step adds anything within the budget; a collapse
that is caught counts one, and another one if the alarm comes before it begins. Then each rule takes the threshold that
fires most without another false alarm of the set (`guard_fit.fit_set`). Thresholds have two digits. The rules whose
events no run had to show keep their thresholds: `not_finite`, `nothing_to_train_on`, `entropy_fall`, `searches_fall`
and, which was seen in few, `groups_alike`.
"""

from __future__ import annotations

import json
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.guard_curve import Tables, achieved, curve, draw_curve
from benchmarks.guard_fit import Outcomes, any_of, count, first_alarms, fit_set
from benchmarks.guard_report import report
from benchmarks.guard_runs import Part, load_choosing, load_judging
from benchmarks.guard_templates import BY_HAND, FITTED, OTHERS, SHAPES, THRESHOLDS, in_use, own_shape, template
from benchmarks.stability_run import REGIMES
from sorl_trl.command_line import Parser, run_command

RESULT = Path(__file__).parent / "results/guard_rules.md"
FALSE_ALARMS = 0.05
"""Most of the healthy choosing runs in which the set may fire."""


def fit_shapes(choosing: Tables) -> list[dict[str, Any]]:
    """The set fitted again with one rule in another shape, and what it does on the runs that fit it."""
    rows = []
    for name in FITTED:
        for shape in SHAPES[name]:
            table = first_alarms(template(name, shape), choosing.outcomes.runs)
            other = Tables({**choosing.fitted, name: table}, choosing.fixed, choosing.outcomes)
            chosen = fit_set(other.fitted, other.fixed, other.outcomes, FALSE_ALARMS)
            row = chosen[name]
            found = {"rule": name, "shape": shape, "own": shape == own_shape(name)}
            found["threshold"] = None if row is None else THRESHOLDS[name][row]
            rows.append(found | {"count": count(other.alarms(chosen), other.outcomes)})
    return rows


def fit_others(choosing: Outcomes, judging: Outcomes) -> list[dict[str, Any]]:
    """Rules that the guard has not, each by itself."""
    rows = []
    for name, other in OTHERS.items():
        table = first_alarms(other, choosing.runs)
        nothing = any_of([], len(choosing.runs))
        row = fit_set({name: table}, nothing, choosing, FALSE_ALARMS)[name]
        if row is not None:
            judged = first_alarms(other, judging.runs)[row]
            rows.append({"rule": name, "threshold": other.thresholds[row], "choosing": table[row], "judging": judged})
    return rows


def main(words: Sequence[str] | None = None) -> None:
    Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args(words)
    choosing, judging = Part.of(load_choosing()), Part.of(load_judging())
    chosen = fit_set(choosing.tables.fitted, choosing.tables.fixed, choosing.outcomes, FALSE_ALARMS)
    fitted = {name: None if row is None else THRESHOLDS[name][row] for name, row in chosen.items()}
    for part in (choosing, judging):
        part.sets["fitted"] = part.tables.alarms(chosen)
    sets = {title: achieved(alarms, judging.outcomes) for title, alarms in judging.sets.items() if title != "fitted"}
    rows = list(curve(choosing.tables, judging.tables, THRESHOLDS))
    thresholds = {
        name: {"by hand": BY_HAND[name], "fitted": fitted[name], "in use": in_use()[name]} for name in FITTED
    }
    draw_curve(rows, sets, RESULT.with_suffix(".png"))
    results = {"thresholds": thresholds, "judged": sets, "curve": rows}
    RESULT.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    shapes, others = fit_shapes(choosing.tables), fit_others(choosing.outcomes, judging.outcomes)
    titles = {name: (regime.world.title, regime.title) for name, regime in REGIMES.items()}
    text = report(choosing, judging, results, shapes, others, titles)
    RESULT.write_text(f"# Which alarms tell of a collapse\n\n{(__doc__ or '').strip()}\n\n{text}")
    print(RESULT.read_text())


if __name__ == "__main__":
    sys.exit(run_command(main))
