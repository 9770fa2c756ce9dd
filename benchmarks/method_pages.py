"""What was measured of each method, beside what its source reports: the generated part of `docs/methods`.

    python -m benchmarks.method_pages

Runs nothing, and reads the archives of the stability benchmark and of `benchmarks.turn_length`: judging seeds, at each
regime's common learning rate.
Writes the two last sections of each page of `docs/methods`, a picture per page in `benchmarks/results/methods/`, and
`benchmarks/results/methods.md`, a table to choose from. Run it again whenever the archive has changed.
"""

from __future__ import annotations

import json
import statistics
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import turn_length
from benchmarks.defaults_report import REPLACED
from benchmarks.method_claims import METHOD_PAGES, MethodPage
from benchmarks.method_cost import COSTS
from benchmarks.method_figures import SHOWN, baselines_of, draw_page
from benchmarks.method_measured import Measured, Tables, difference_cell
from benchmarks.method_overview import overview_page
from benchmarks.method_rates import own_table
from benchmarks.stability import ARCHIVE, RESULTS, ROOT, is_current, is_made_as, key, read_archive
from benchmarks.stability_report import collapses, harness_marks, lines_of_table
from benchmarks.stability_statistics import Grid, Run, judged, published_grid, read_runs
from benchmarks.turn_length_grid import WITH_OTHERS
from sorl_trl.command_line import Parser, run_command

PAGES = ROOT / "docs" / "methods"
PICTURES = RESULTS / "methods"
OVERVIEW = RESULTS / "methods.md"
BEGIN, END = "<!-- measured: made by benchmarks/method_pages.py -->", "<!-- end of measured -->"
NOT_MEASURED = "Not measured: the archive of the stability benchmark has no judging run of it."
READING = """Final exact match (EM) on an unseen world at each regime's common learning rate, mean over the judging
seeds; ¹, ² and ³ are the harnesses. A run has collapsed if it ends below its start or below half of its best.
Differences are of sampled EM, paired by seed within one harness: mean, 95 % bootstrap interval, p of the exact
sign-flip test, pairs. "–": there is no such pair; °: of GRPO in our trainer, which computes the same, where TRL's
has no run of that harness. Here are many comparisons, of small policies, at learning rates that were not searched
for each method ([stability](../../benchmarks/results/stability.md))."""


def by_regime(runs: Iterable[Run], grid: Grid, own: bool = False) -> Tables:
    """The judging runs at the common learning rate, or at each row's own."""
    return {regime: table for (regime, tuned), table in judged([*runs], grid).items() if table and tuned is own}


def measured_row(name: str, regime: str, measured: Measured, baselines: Sequence[str]) -> list[str]:
    """A line of a page's table."""
    grid, runs = measured.grid, measured.tables[regime][name]
    sampled, greedy = ([run.final(score) for run in runs] for score in ("sampled_em", "greedy_em"))
    errors = {str(run.seed): run.error for run in runs if run.error}
    summary = {"collapses": sum(run.collapsed for run in runs), "seeds": runs, "errors": errors}
    return [
        grid.regimes[regime].title,
        grid.methods[name].title,
        f"{statistics.fmean(sampled):.3f}{harness_marks({run.harness for run in runs})}",
        f"{statistics.fmean(greedy):.3f}",
        collapses(summary),
        *(difference_cell(measured.difference(name, other, regime)) for other in baselines),
    ]


def measured_table(page: MethodPage, measured: Measured) -> str:
    """Regimes by the page's rows; says so where nothing was measured, and which rows were not."""
    grid, tables = measured.grid, measured.tables
    baselines = list(baselines_of(page.rows, grid))
    there = [(regime, name) for regime in tables for name in page.rows if name in tables[regime]]
    if not there:
        return NOT_MEASURED if page.rows else ""
    titles = [f"less {grid.methods[name].title}" for name in baselines]
    columns = ["regime", "row", "sampled EM", "greedy EM", "collapses", *titles]
    body = [measured_row(name, regime, measured, baselines) for regime, name in there]
    ran = {name for _, name in there}
    lacking = [name for name in page.rows if name in grid.methods and name not in ran]
    note = f"\nNot measured: {', '.join(f'`{name}`' for name in lacking)}.\n" if lacking else ""
    return lines_of_table(columns, body) + note


def measured_part(name: str, page: MethodPage, measured: Measured) -> str:
    """The two sections of a page between `BEGIN` and `END`."""
    table = measured_table(page, measured)
    blocks = ["## What was measured beside what was reported", f"**As reported.** {page.reported}"]
    blocks += ["**Measured here.**" + (f" {page.elsewhere}" if page.elsewhere else ""), table.strip()]
    blocks += [READING] if table.startswith("|") else []
    if at_own := own_table(page, measured):
        blocks += ["**At its own learning rate.**", at_own.strip()]
    blocks += ["## Curves", curves(name, page, measured)]
    return "\n\n".join(block for block in blocks if block)


def curves(name: str, page: MethodPage, measured: Measured) -> str:
    """The picture and what it shows, or that there is none."""
    shown = [regime for regime in SHOWN if any(row in measured.tables.get(regime, {}) for row in page.rows)]
    if not shown:
        return "None: nothing of it was measured in the regimes that pages draw."
    regimes = " and ".join(f"*{measured.grid.regimes[regime].title}*" for regime in shown)
    text = f"Sampled EM after each rollout in {regimes}: thick the mean over the judging seeds, thin each seed."
    return f"![{page.title}: sampled EM over rollouts](../../benchmarks/results/methods/{name}.png)\n\n{text}"


def renewed(text: str, made: str) -> str:
    """The page with its generated part replaced.

    Raises:
        ValueError: the page has not one `BEGIN` and, after it, one `END`.
    """
    parts = text.split(BEGIN)
    if len(parts) != 2 or parts[1].count(END) != 1:
        raise ValueError(f"A page of `docs/methods` must have {BEGIN!r} once and {END!r} once after it.")
    return f"{parts[0]}{BEGIN}\n\n{made}\n\n{END}{parts[1].split(END)[1]}"


def existing_pages() -> dict[str, tuple[Path, MethodPage]]:
    """The pages of `METHOD_PAGES` that are written."""
    paths = {name: PAGES / f"{name}.md" for name in METHOD_PAGES}
    return {name: (path, METHOD_PAGES[name]) for name, path in paths.items() if path.is_file()}


def grid_of_pages() -> Grid:
    """The stability benchmark's, and the long turns of `turn_length_grid.py`."""
    grid = published_grid()
    rates = {name: regime.learning_rate for name, regime in WITH_OTHERS.items()}
    return replace(
        grid,
        regimes={**grid.regimes, **WITH_OTHERS},
        common_learning_rate={**grid.common_learning_rate, **rates},
        choices={**grid.choices, **dict.fromkeys(WITH_OTHERS, ())},
    )


def of_long_turns() -> list[dict[str, Any]]:
    """The archived runs with long turns."""
    return [
        record
        for record in read_archive(turn_length.ARCHIVE)
        if record["regime"] in WITH_OTHERS and is_made_as(record, key(record))
    ]


def read_all() -> Measured:
    """The judging runs of the archives, and those of earlier harnesses that were made again with the same settings."""
    grid = grid_of_pages()
    records = [*filter(is_current, read_archive(ARCHIVE)), *of_long_turns()]
    runs = read_runs(records, grid)
    settings = {(run.cell, run.seed): run.record["settings"] for run in runs}
    replaced = [
        run for run in map(Run, read_archive(REPLACED)) if settings.get((run.cell, run.seed)) == run.record["settings"]
    ]
    costs = json.loads(COSTS.read_text()) if COSTS.is_file() else {}
    return Measured(grid, by_regime(runs, grid), by_regime(replaced, grid), costs, by_regime(runs, grid, own=True))


def main(words: Sequence[str] | None = None) -> None:
    Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args(words)
    measured, pages = read_all(), existing_pages()
    PICTURES.mkdir(exist_ok=True)
    for name, (path, page) in pages.items():
        path.write_text(renewed(path.read_text(), measured_part(name, page, measured)))
        draw_page(page.rows, measured.tables, measured.grid, PICTURES / f"{name}.png")
    OVERVIEW.write_text(overview_page(measured, [*pages]))
    print(f"{len(pages)} pages of {PAGES}, {OVERVIEW}")


if __name__ == "__main__":
    sys.exit(run_command(main))
