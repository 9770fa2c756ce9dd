"""What switches of other methods give or take on top of our defaults, by kind of world."""

from __future__ import annotations

from benchmarks.defaults_report import SCORES, cell, differences, merged
from benchmarks.method_measured import OURS, Measured
from benchmarks.other_methods import OTHER_METHODS
from benchmarks.stability_report import lines_of_table

KINDS = {
    "questions": ("gentle", "reuse", "stale", "hot", "long"),
    "hunts": ("hunt-gentle", "hunt-reuse", "hunt-stale"),
    "turns of 40": ("turns-of-40-in-3-hops",),
    "turns of 80": ("turns-of-80-in-3-hops",),
}
"""Kind of world to its regimes."""
HEAD = """## On top of our defaults

What each switch gives (+) or takes (−), over the judging seeds of all regimes of a kind: mean ± standard error over
worlds (their number, p of the exact two-sided sign-flip test). Regimes of a seed that share a world count once, with
their mean. "–": not run. Here are {comparisons} comparisons, of which one in twenty has a p below .05 by chance.
"""


def switch_rows(measured: Measured, score: str) -> list[list[str]]:
    """A row per method on top of our defaults that was run: its difference in each kind of world."""
    runs = [run for table in measured.tables.values() for of_row in table.values() for run in of_row]
    rows = []
    for name in (name for name in OTHER_METHODS if name.startswith("so_") and name in measured.grid.methods):
        found = [
            merged(differences(runs, (name, OURS), regime, score) for regime in regimes) for regimes in KINDS.values()
        ]
        if any(found):
            rows.append([measured.grid.methods[name].title, *map(cell, found)])
    return rows


def switches_section(measured: Measured) -> str:
    """A table for sampled and one for greedy answers; empty where no switch was run."""
    tables = {title: switch_rows(measured, score) for score, title in SCORES.items()}
    comparisons = sum(each != "–" for rows in tables.values() for row in rows for each in row[1:])
    blocks = [f"**{title}.**\n\n{lines_of_table(['', *KINDS], rows)}" for title, rows in tables.items()]
    return "\n".join([HEAD.format(comparisons=comparisons), *blocks]) if comparisons else ""
