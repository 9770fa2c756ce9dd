"""What methods end at, each at the learning rate that suits it best: a table of a page, and a column for choosing."""

from __future__ import annotations

import statistics

from benchmarks.method_claims import MethodPage
from benchmarks.method_measured import STAND_INS, Measured, difference_cell
from benchmarks.seed_statistics import paired
from benchmarks.stability_report import collapses, harness_marks, lines_of_table

CONTROL = next(iter(STAND_INS.values()))
"""GRPO in our trainer, whose own learning rate was looked for in the same way."""
COLUMNS = ("regime", "row", "learning rate", "sampled EM", "greedy EM", "collapses")
READING = """Learning rates were chosen on the choosing seeds, of those that the regime names; "(at the end)" marks the
lowest or highest of them, beyond which a better one may lie."""


def own_table(page: MethodPage, measured: Measured) -> str:
    """Regimes by the page's rows, at each row's own learning rate; empty where none was looked for."""
    titles = ["less our defaults, at the common one", "less GRPO in our trainer, at its own"]
    body = [own_row(name, regime, measured) for regime, name in own_cells(page, measured)]
    return f"{lines_of_table([*COLUMNS, *titles], body)}\n{READING}" if body else ""


def own_cells(page: MethodPage, measured: Measured) -> list[tuple[str, str]]:
    """Regime and row, where there are runs."""
    return [(regime, name) for regime, table in measured.own.items() for name in page.rows if name in table]


def own_row(name: str, regime: str, measured: Measured) -> list[str]:
    """A line of the table."""
    grid, runs = measured.grid, measured.own[regime][name]
    sampled, greedy = ([run.final(score) for run in runs] for score in ("sampled_em", "greedy_em"))
    errors = {str(run.seed): run.error for run in runs if run.error}
    rate, rates = runs[0].cell[2], grid.learning_rates(regime)
    return [
        grid.regimes[regime].title,
        grid.methods[name].title,
        f"{rate:g}{' (at the end)' if rate in (rates[0], rates[-1]) else ''}",
        f"{statistics.fmean(sampled):.3f}{harness_marks({run.harness for run in runs})}",
        f"{statistics.fmean(greedy):.3f}",
        collapses({"collapses": sum(run.collapsed for run in runs), "seeds": runs, "errors": errors}),
        difference_cell(measured.less_ours(name, regime)),
        difference_cell(None if name == CONTROL else paired(runs, measured.own[regime].get(CONTROL, []))),
    ]


def own_cell(name: str, measured: Measured) -> str:
    """For the overview: in which regimes a row was run at its own rate, less our defaults."""
    found = {regime: measured.less_ours(name, regime) for regime, table in measured.own.items() if name in table}
    parts = [f"{measured.grid.regimes[regime].title} ({pair['mean']:+.2f})" for regime, pair in found.items() if pair]
    return ", ".join(parts) or "–"
