"""Which part of SO-GRPO helps, once learning rates are equal?

    python -m benchmarks.equal_rates                            # every run that is not there yet: hours
    python -m benchmarks.equal_rates --columns reuse stale      # of some columns
    python -m benchmarks.equal_rates --search                   # searches learning rates, and judges the best ones
    python -m benchmarks.equal_rates --report                   # only writes the report again

Runs the arms of `equal_plan.py` as `benchmarks.stability` runs its methods, into the same folder. Writes
`benchmarks/results/equal_rates.json` and `.md`.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from benchmarks.common import RESULTS, Row, read_rows, table, write_rows
from benchmarks.equal_plan import (
    ARMS,
    CHECK,
    COLUMNS,
    FIRST_RATES,
    FRESH_SEEDS,
    GRID,
    HEADLINE,
    SEARCHED,
    YOKE,
    arms_of,
    seeds_of,
)
from benchmarks.stability import load, run_all
from benchmarks.stability_plan import CHOOSING_SEEDS
from benchmarks.stability_report import Record, Run, rounded, summarize
from benchmarks.stability_run import Job
from sorl_trl.command_line import Parser, at_least, run_command

# -------------------------------------------------------------------------------------------------------------------
# Runs
# -------------------------------------------------------------------------------------------------------------------


def equal_jobs(columns: Sequence[str], seed: int, yoked: bool) -> Iterator[Job]:
    """Of all arms at the learning rate of the column: those that follow another run, or the others."""
    for column in (name for name in columns if seed in seeds_of(name)):
        for arm in arms_of(column):
            if bool(ARMS[arm].follows) == yoked and (arm != CHECK or seed == FRESH_SEEDS[0]):
                yield Job(column, arm, COLUMNS[column].learning_rate, seed)


def search_jobs(columns: Sequence[str], runs: Sequence[Run]) -> Iterator[Job]:
    """The first rates of each searched arm, and the next one beyond an end that is the best so far."""
    for column, arm in product(columns, SEARCHED):
        ends = searched(runs, column, arm)
        beyond = []
        if {*FIRST_RATES} <= {*ends}:
            at = GRID.index(best_rate(ends))
            beyond = [GRID[i] for i in (at - 1, at + 1) if 0 <= i < len(GRID)]
        for seed in CHOOSING_SEEDS:
            yield from (Job(column, arm, rate, seed) for rate in {*FIRST_RATES, *beyond})


def best_rate(ends: Mapping[float, float]) -> float:
    """The learning rate with the highest final EM, of equals the lowest."""
    return max(ends, key=lambda rate: (round(ends[rate], 9), -rate))  # means that differ in their last bits are equal


def searched(runs: Sequence[Run], column: str, arm: str) -> dict[float, float]:
    """Learning rate to the mean final EM of the choosing seeds, of those that all of them have run with."""
    ends: dict[float, list[float]] = {}
    for run in runs:
        if run.cell[:2] == (column, arm) and run.seed in CHOOSING_SEEDS:
            ends.setdefault(run.cell[2], []).append(run.final("sampled_em"))
    return {rate: statistics.fmean(each) for rate, each in ends.items() if len(each) == len(CHOOSING_SEEDS)}


def make_runs(columns: Sequence[str], search: bool, workers: int) -> None:
    """Every run that is not there yet."""
    if not search:
        for seed in sorted({seed for name in columns for seed in seeds_of(name)}):
            for yoked in (False, True):  # what is followed first
                run_all(equal_jobs(columns, seed, yoked), workers, f"Seed {seed}{', yoked' * yoked}")
        return
    while jobs := {*search_jobs(columns, runs_there_are())} - load().keys():
        run_all(sorted(jobs, key=str), workers, "Searching learning rates")
    runs = runs_there_are()
    own = {cell: searched(runs, *cell) for cell in product(columns, SEARCHED)}
    jobs = [Job(*cell, best_rate(ends), seed) for cell, ends in own.items() for seed in seeds_of(cell[0]) if ends]
    run_all(jobs, workers, "At the chosen learning rates")


def runs_there_are() -> list[Run]:
    return sorted(map(Run, load().values()), key=lambda run: run.seed)


# -------------------------------------------------------------------------------------------------------------------
# Report
# -------------------------------------------------------------------------------------------------------------------
HEADER = """# Which part of SO-GRPO helps, once learning rates are equal?

Written by `python -m benchmarks.equal_rates`, which made all runs of a column on one machine. All arms run in this
package's trainer. They start from the same policy and see the same questions, seed by seed; seeds {judging} judge, and
had no part in any choice between arms. **A yoked arm has no target KL**: its learning rate is, update for update, the
one that the target KL gave SO-GRPO in the same world with the same seed. [What we
expected](equal_rates_predictions.md) was written before the first run.

A cell is the final sampled exact match on an unseen world (the mean of the last five evaluations), how many runs
collapsed, and the learning rate: its mean over all updates, and over those on the last rollout. Differences are
paired by seed: mean ± standard error over seeds, also of all columns, which are averaged first. {check}"""
CHECKED = "SO-GRPO yoked to itself repeats its own run exactly in {same} of {all} columns, as it must."
SEARCH = """## Learning rates, searched alike

Final sampled exact match, the mean over seeds {seeds}. Where an end of what had run was best, the next rate of the
grid followed. **Bold** is the best, which the seeds that judge ran with. The last column is what the worst rate of
1e-4 to 3e-3 loses against the best of all."""
OWN = """## At the rate of its own

On the seeds that judge, with the rate that the search chose. Differences are SO-GRPO at the rate of the *column*,
which nobody searched for, less the arm at its own."""
OTHERS = """## Long turns, and noise between sampler and trainer

Long turns have two policies to start from, one for seeds 301 to 304: errors are over questions and random numbers. The
engine's noise is that of [routing](routing.md), and no router has an auxiliary loss."""
DIFFERENCES = "SO-GRPO less the arm: what the default gains over it, if positive."
EVERY = "## Every seed"


def make_rows(runs: Sequence[Run], earlier: Sequence[Row]) -> list[Row]:
    """A row per column, arm, learning rate and kind of seeds; those of cells that have not run again stay."""
    made = {_key(row): row for row in earlier}
    cells: dict[tuple[str, str, float, bool], list[Run]] = {}
    for run in runs:
        if run.cell[0] in COLUMNS and run.cell[1] in ARMS and run.seed in (*CHOOSING_SEEDS, *seeds_of(run.cell[0])):
            cells.setdefault((*run.cell, run.seed in CHOOSING_SEEDS), []).append(run)
    for (column, arm, rate, is_search), of in cells.items():
        row = {"regime": column, "method": arm, "learning_rate": rate, "search": is_search, **summarize(of)}
        if {*made.get(_key(row), row)["seeds"]} <= {*row["seeds"]}:
            made[_key(row)] = row
    order = [*COLUMNS], [*ARMS]
    return sorted(
        made.values(),
        key=lambda row: (row["search"], *(each.index(row[name]) for each, name in zip(order, KEY, strict=False))),
    )


KEY = ("regime", "method", "learning_rate", "search")


def _key(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in KEY)


def at_common(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """(column, arm) to the row at the learning rate of the column."""
    return {
        (row["regime"], row["method"]): row
        for row in rows
        if not row["search"] and row["learning_rate"] == rounded(COLUMNS[row["regime"]].learning_rate)
    }


def differences(first: Row | None, second: Row | None) -> list[float]:
    """Final EM of the first less the second's, of each seed that both have."""
    if first is None or second is None:
        return []
    one, other = (dict(zip(row["seeds"], row["sampled_em_by_seed"], strict=True)) for row in (first, second))
    return [one[seed] - other[seed] for seed in one if seed in other]


def over_seeds(rows: Mapping[tuple[str, str], Row], columns: Sequence[str], arm: str) -> list[float]:
    """SO-GRPO less the arm, averaged over the columns, of each seed."""
    found: dict[int, list[float]] = {}
    for name in columns:
        first, second = rows.get((name, YOKE)), rows.get((name, arm))
        if first and second:
            shared = [seed for seed in first["seeds"] if seed in second["seeds"]]
            for seed, difference in zip(shared, differences(first, second), strict=True):
                found.setdefault(seed, []).append(difference)
    return [statistics.fmean(each) for each in found.values()]


def with_error(values: Sequence[float]) -> str:
    """Mean ± standard error."""
    if len(values) < 2:
        return "–"
    return f"{statistics.fmean(values):+.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"


def cell(row: Row | None) -> str:
    if row is None:
        return "–"
    seeds = len(row["seeds"])
    fallen = f", {row['collapses']} of {seeds}" if row["collapses"] else ""
    few = f", {seeds} seeds" if seeds < len(FRESH_SEEDS) else ""
    return f"{row['sampled_em']:.3f}{fallen}{few} ({row['rate_mean']:.1e} → {row['rate_final']:.1e})"


def equal_tables(title: str, columns: Sequence[str], rows: Mapping[tuple[str, str], Row]) -> Iterator[str]:
    """Where arms end, and how far from SO-GRPO, if any has run; pooled where all columns have the same seeds."""
    columns = [name for name in columns if any(place[0] == name for place in rows)]
    if not columns:
        return
    pooled = set(columns) <= set(HEADLINE)
    yield title
    titles = [f"{COLUMNS[name].title}, {COLUMNS[name].learning_rate:g}" for name in columns]
    arms = [arm for arm in ARMS if any((name, arm) in rows for name in columns)]
    ends = [[ARMS[arm].title, *(cell(rows.get((name, arm))) for name in columns)] for arm in arms if arm != CHECK]
    yield table(["arm", *titles], ends, 1)
    lines = []
    for arm in (each for each in arms if each not in (YOKE, CHECK)):
        found = [with_error(differences(rows.get((name, YOKE)), rows.get((name, arm)))) for name in columns]
        lines.append([ARMS[arm].title, *found, *([with_error(over_seeds(rows, columns, arm))] if pooled else [])])
    yield DIFFERENCES
    yield table(["arm", *titles, *(["all columns"] if pooled else [])], lines, 1)


def search_tables(rows: Sequence[Row]) -> Iterator[str]:
    """What each rate ended at on the choosing seeds, and the best of them on those that judge."""
    found = {_key(row)[:3]: row for row in rows if row["search"] and len(row["seeds"]) == len(CHOOSING_SEEDS)}
    judged = {_key(row)[:3]: row for row in rows if not row["search"]}
    common = at_common(rows)
    rates = [rate for rate in GRID if any(place[2] == rate for place in found)]
    lines, own = [], []
    for column in HEADLINE:
        for arm in SEARCHED:
            ends = {rate: found[column, arm, rate]["sampled_em"] for rate in GRID if (column, arm, rate) in found}
            if not ends:
                continue
            best = best_rate(ends)
            wide = [ends[rate] for rate in ends if 1e-4 <= rate <= 3e-3]
            shown = {rate: f"{end:.3f}" for rate, end in ends.items()} | {best: f"**{ends[best]:.3f}**"}
            cells = [shown.get(rate, "–") for rate in rates]
            lines.append([COLUMNS[column].title, ARMS[arm].title, *cells, f"{ends[best] - min(wide):.3f}"])
            row = judged.get((column, arm, best))
            pair = differences(common.get((column, YOKE)), row)
            own.append([COLUMNS[column].title, ARMS[arm].title, cell(row), with_error(pair)])
    if lines:
        yield SEARCH.format(seeds=", ".join(map(str, CHOOSING_SEEDS)))
        yield table(["", "arm", *(f"{rate:g}" for rate in rates), "loses"], lines, 2)
        yield OWN
        yield table(["", "arm", "at its own rate", "SO-GRPO less that"], own, 2)


def report(rows: Sequence[Row]) -> str:
    """`equal_rates.md`."""
    common = at_common(rows)
    checks = [differences(common.get((name, YOKE)), common.get((name, CHECK))) for name in COLUMNS]
    checks = [each for each in checks if each]
    check = CHECKED.format(same=sum(not any(each) for each in checks), all=len(checks)) if checks else ""
    blocks = [HEADER.format(judging=f"{FRESH_SEEDS[0]} to {FRESH_SEEDS[-1]}", check=check)]
    blocks += equal_tables("## Five ways to drive training hard", HEADLINE, common)
    blocks += equal_tables(OTHERS, [name for name in COLUMNS if name not in HEADLINE], common)
    blocks += search_tables(rows)
    lines = [
        [
            *(COLUMNS[row["regime"]].title, ARMS[row["method"]].title, f"{row['learning_rate']:g}"),
            *(f"{row['rate_mean']:.2e}", f"{row['rate_final']:.2e}", f"{row['clip_fraction'] or 0:.3f}"),
            f"{row['kl_max']:.2g}" if row["kl_max"] is not None else "–",
            " ".join(f"{seed}: {em:.3f}" for seed, em in zip(row["seeds"], row["sampled_em_by_seed"], strict=True)),
        ]
        for row in rows
    ]
    names = ["", "arm", "rate", "its mean", "its last", "tokens outside", "KL max", "final EM of each seed"]
    blocks += [EVERY, table(names, lines, 2)]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def write_report(records: Sequence[Record]) -> None:
    rows = make_rows(sorted(map(Run, records), key=lambda run: run.seed), read_rows(RESULTS / "equal_rates.json"))
    write_rows(rows, RESULTS / "equal_rates.json")
    (RESULTS / "equal_rates.md").write_text(report(rows))


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--search", action="store_true", help="search learning rates, and judge the best ones")
    parser.add_argument(
        "--columns", nargs="+", choices=COLUMNS, help=f"default: all; with --search {' '.join(HEADLINE)}"
    )
    parser.add_argument("--workers", type=at_least(1), default=os.cpu_count() or 1, help="runs at a time")
    arguments = parser.parse_args(words)
    columns = arguments.columns or (HEADLINE if arguments.search else [*COLUMNS])
    if arguments.search and not {*columns} <= {*HEADLINE}:
        parser.error(f"learning rates are searched in these columns: {', '.join(HEADLINE)}")
    if not arguments.report:
        make_runs(columns, arguments.search, arguments.workers)
    write_report([*load().values()])
    print(f"The report is in {RESULTS / 'equal_rates.md'}.")


if __name__ == "__main__":
    sys.exit(run_command(main))
