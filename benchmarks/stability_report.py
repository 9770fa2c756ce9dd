"""The stability benchmark's report, `stability.md`, from the rows of `stability.jsonl`; and what became of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.common import Row, table
from benchmarks.stability_plan import (
    ARMS,
    CHOOSING_SEEDS,
    COLUMNS,
    COLUMNS_WITH_CRITIC,
    FIRST_RATES,
    FOLLOWING,
    GRID,
    JUDGING_SEEDS,
    SEARCHED,
    WITH_CRITIC,
    searched_in,
)

LAST = 5
"""Rollouts at the end whose evaluations make the score."""
LATITUDE = 0.015
"""By how much another arm may be ahead in a column, or by one standard error of the difference."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One run and what became of it. A run that died (`error`) ends with an EM of 0 and has collapsed."""

    record: Record

    @property
    def start(self) -> float:
        """Sampled EM of the policy that the run started from."""
        return next((entry["sampled_em"] for entry in self.record["evaluations"] if entry["rollout"] == 0), 0.0)

    @property
    def best(self) -> float:
        """Sampled EM of the best single evaluation."""
        return max((entry["sampled_em"] for entry in self.record["evaluations"]), default=0.0)

    def final(self, score: str) -> float:
        """Mean of `score` ("sampled_em" or "greedy_em") over the evaluations after the last five rollouts."""
        if self.record["error"]:
            return 0.0
        evaluations = self.record["evaluations"]
        last = max(entry["rollout"] for entry in evaluations)
        return statistics.fmean(entry[score] for entry in evaluations if entry["rollout"] > max(0, last - LAST))

    @property
    def rates(self) -> tuple[float, float]:
        """The mean learning rate of its updates, and the mean of those on its last rollout."""
        taken = self.record["rates"]
        last = -(-len(taken) // len(self.record["rollouts"]))
        return statistics.fmean(taken), statistics.fmean(taken[-last:])

    @cached_property
    def collapsed(self) -> bool:
        """Died, or the final sampled EM is below the start's or below half of the best evaluation's."""
        return bool(self.record["error"]) or self.final("sampled_em") < max(self.start, self.best / 2)

    def metric(self, key: str) -> list[float]:
        """A training metric, rollout by rollout, without the rollouts that have none."""
        figures = [rollout.get(key) for rollout in self.record["rollouts"]]
        return [float(figure) for figure in figures if figure is not None and not math.isnan(figure)]


def rounded(rate: float) -> float:
    """Three digits: 0.3 × 5e-4 and 1.5e-4 are the same learning rate, whatever their last bits."""
    return float(f"{rate:.3g}")


def row_of(record: Record) -> Row:
    """A line of `stability.jsonl`."""
    made = Run(record)
    outside, kls = made.metric("clip_fraction/turn"), made.metric("kl_to_old max")
    return {
        **{name: record[name] for name in ("column", "arm", "rate", "seed")},
        "start": round(made.start, 4),
        "score": round(made.final("sampled_em"), 4),
        "collapsed": made.collapsed,
        "error": record["error"],
        "outside": float(f"{statistics.fmean(outside):.3g}") if outside else None,
        "kl_max": max(kls, default=None),
        "rates": [float(f"{each:.3g}") for each in made.rates],
        "seconds": record["seconds"],
        "curve": [round(each["sampled_em"], 3) for each in record["evaluations"]],
    }


# -------------------------------------------------------------------------------------------------------------------
# Learning rates
# -------------------------------------------------------------------------------------------------------------------


def searched(rows: Sequence[Row], column: str, arm: str) -> dict[float, float]:
    """Learning rate to the mean score of the choosing seeds, of those that all of them have run with."""
    scores: dict[float, dict[int, float]] = {}
    for row in rows:
        if (row["column"], row["arm"]) == (column, arm) and row["seed"] in CHOOSING_SEEDS:
            scores.setdefault(row["rate"], {})[row["seed"]] = row["score"]
    return {rate: statistics.fmean(of.values()) for rate, of in scores.items() if len(of) == len(CHOOSING_SEEDS)}


def best_rate(scores: Mapping[float, float]) -> float:
    """The learning rate with the highest score, of equals the lowest."""
    return max(scores, key=lambda rate: (round(scores[rate], 9), -rate))  # means that differ in their last bits


def rate_of(rows: Sequence[Row], column: str, arm: str) -> float | None:
    """The learning rate that an arm is judged with: the column's, or what the search chose, once it is over."""
    if arm not in SEARCHED:
        return rounded(COLUMNS[column].learning_rate)
    scores = searched(rows, searched_in(column), arm)
    if not {*FIRST_RATES} <= {*scores}:
        return None
    best, known = best_rate(scores), [rate for rate in GRID if rate in scores]
    return None if best in (known[0], known[-1]) and best not in (GRID[0], GRID[-1]) else best


# -------------------------------------------------------------------------------------------------------------------
# Tables
# -------------------------------------------------------------------------------------------------------------------

HEADER = """# Is training stable at any turn length?

Written by `python -m benchmarks.stability` from every run that it has made (`stability.jsonl`). Policies of 131,200 to
353,408 parameters learn to search or hunt in synthetic worlds, on CPUs. A score is the final exact match of sampled
answers in an unseen world: the mean over the evaluations after the last five rollouts. A run has **collapsed** if that
is below the score of the policy that it started from, or below half of its own best evaluation.

Arms differ in the loss and in how the learning rate is set. The rate of arms with a target KL follows the KL, from the
column's rate down. Constant rates were searched in each column alike, on seeds {choosing}. Seeds {judging} judge, and
chose nothing; in long turns, 401 to 404 start from one policy and 405 to 408 from another. [Predictions](
stability_predictions.md) were committed before the first judging run; [what lost](choosing.md)."""
COLUMNS_TITLE = "## Columns"
DIFFERENCES = """## {title} less each arm

Mean ± standard error over seeds, paired by seed. The last two columns are means over all columns that both have, with
the standard error over seeds (columns averaged first), and with columns as random, too."""
SEARCH = """## Searched learning rates

Mean score of seeds {choosing}. Where an end of what had run was best, the next rate of the grid followed. **Bold** is
the rate that judges."""
EVERY = "## Every run"


Cells = dict[tuple[str, str], dict[int, Row]]
"""(Column, arm) to the rows of the judging seeds, at the learning rate that the arm is judged with."""


def judged(rows: Sequence[Row]) -> Cells:
    cells: Cells = {}
    for column in COLUMNS:
        for arm in ARMS:
            rate, of = rate_of(rows, column, arm), searched_in(column) if arm in SEARCHED else column
            found = {
                row["seed"]: row
                for row in rows
                if (row["column"], row["arm"], row["rate"]) == (of, arm, rate) and row["seed"] in JUDGING_SEEDS
            }
            if found:
                cells[column, arm] = found
    return cells


def differences(cells: Cells, column: str, first: str, second: str) -> dict[int, float]:
    """Score of the first arm less the second's, of each seed that both have."""
    one, other = cells.get((column, first), {}), cells.get((column, second), {})
    return {seed: one[seed]["score"] - other[seed]["score"] for seed in one if seed in other}


def error_of(values: Sequence[float]) -> float:
    """The standard error of their mean."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


def with_error(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):+.3f} ± {error_of(values):.3f}" if len(values) > 1 else "–"


def over_columns(cells: Cells, columns: Sequence[str], first: str, second: str) -> tuple[str, str]:
    """The mean difference over columns, with its standard error over seeds, and over columns."""
    found = {column: differences(cells, column, first, second) for column in columns}
    found = {column: of for column, of in found.items() if of}
    if len(found) < 2:
        return "–", "–"
    seeds = set.intersection(*({*of} for of in found.values()))
    by_seed = [statistics.fmean(of[seed] for of in found.values()) for seed in sorted(seeds)]
    return with_error(by_seed), with_error([statistics.fmean(of.values()) for of in found.values()])


def verdict(cells: Cells, own: str, others: Sequence[str], columns: Sequence[str]) -> Iterator[str]:
    """Whether no run of the default collapsed, and in which columns another arm is ahead by more than the latitude."""
    runs = [row for column in columns for row in cells.get((column, own), {}).values()]
    fallen = [row for row in runs if row["collapsed"]]
    yield f"- **Collapsed:** {len(fallen)} of {len(runs)} runs of {ARMS[own].title}."
    behind, complete = [], 0
    for column in columns:
        found = {arm: [*differences(cells, column, own, arm).values()] for arm in others}
        found = {arm: of for arm, of in found.items() if len(of) > 1}
        if not found:
            continue
        complete += 1
        best = min(found, key=lambda arm: statistics.fmean(found[arm]))
        gap = -statistics.fmean(found[best])
        if gap > max(LATITUDE, error_of(found[best])):
            behind.append(f"{COLUMNS[column].title} ({ARMS[best].title}, {with_error(found[best])})")
    which = ": " + "; ".join(behind) if behind else ""
    yield (
        f"- **Behind the best arm** by more than {LATITUDE:.3f}, and by more than one standard error, in "
        f"{len(behind)} of {complete} columns{which}."
    )


def cell(of: Mapping[int, Row]) -> str:
    """Mean score, how many runs collapsed, and the mean learning rate."""
    if not of:
        return "–"
    rows = [*of.values()]
    fallen = sum(row["collapsed"] for row in rows)
    few = f" ({len(rows)} of {len(JUDGING_SEEDS)} seeds)" if len(rows) < len(JUDGING_SEEDS) else ""
    rate = statistics.fmean(row["rates"][0] for row in rows)
    said = f", **{fallen} collapsed**" if fallen else ""
    return f"{statistics.fmean(row['score'] for row in rows):.3f}{said} @ {rate:.0e}{few}"


def score_tables(cells: Cells, title: str, own: str, arms: Sequence[str], columns: Sequence[str]) -> Iterator[str]:
    """Scores, then differences, then the verdict."""
    arms = [arm for arm in arms if any((column, arm) in cells for column in columns)]
    if own not in arms:
        return
    yield f"## {title}"
    yield from verdict(cells, own, [arm for arm in arms if arm != own], columns)
    lines = []
    for column in (name for name in columns if any((name, arm) in cells for arm in arms)):
        title = f"{COLUMNS[column].title}, {COLUMNS[column].learning_rate:g}"
        lines.append([title, *(cell(cells.get((column, arm), {})) for arm in arms)])
    yield table(["column, rate", *(ARMS[arm].title for arm in arms)], lines, 1)
    yield DIFFERENCES.format(title=ARMS[own].title.strip("*"))
    lines = []
    for arm in (each for each in arms if each != own):
        each = [with_error([*differences(cells, column, own, arm).values()]) for column in columns]
        lines.append([ARMS[arm].title, *each, *over_columns(cells, columns, own, arm)])
    yield table(["less", *(COLUMNS[name].title for name in columns), "over seeds", "over columns"], lines, 1)


def search_table(rows: Sequence[Row]) -> Iterator[str]:
    lines = []
    for column in (name for name in COLUMNS if name == searched_in(name)):
        for arm in SEARCHED:
            scores, chosen = searched(rows, column, arm), rate_of(rows, column, arm)
            shown = {rate: f"{score:.3f}" for rate, score in scores.items()}
            if chosen is not None:
                shown[chosen] = f"**{shown[chosen]}**"
            if shown:
                lines.append([COLUMNS[column].title, ARMS[arm].title, *(shown.get(rate, "–") for rate in GRID)])
    if lines:
        yield SEARCH.format(choosing=" and ".join(map(str, CHOOSING_SEEDS)))
        yield table(["column", "arm", *(f"{rate:g}" for rate in GRID)], lines, 2)


def report(rows: Sequence[Row]) -> str:
    """`stability.md`."""
    cells, choosing = judged(rows), " and ".join(map(str, CHOOSING_SEEDS))
    blocks = [HEADER.format(choosing=choosing, judging=f"{min(JUDGING_SEEDS)} to {max(JUDGING_SEEDS)}")]
    blocks += score_tables(cells, "Without a critic", "so_grpo", [*FOLLOWING, *SEARCHED], [*COLUMNS])
    blocks += score_tables(cells, "With a critic", "so_ppo", WITH_CRITIC, COLUMNS_WITH_CRITIC)
    blocks += search_table(rows)
    blocks += [COLUMNS_TITLE, "\n".join(f"- **{each.title}**: {_described(each)}" for each in COLUMNS.values())]
    every: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows:
        every.setdefault((row["column"], row["arm"], row["rate"]), []).append(row)
    order = [*COLUMNS], [*ARMS]
    lines = [
        [
            *(COLUMNS[column].title, ARMS[arm].title, f"{rate:g}"),
            f"{statistics.fmean(row['rates'][0] for row in of):.1e}",
            f"{statistics.fmean(row['outside'] or 0 for row in of):.3f}",
            f"{statistics.fmean(row['seconds'] for row in of):.0f}",
            " ".join(f"{row['seed']}: {row['score']:.3f}{'*' * row['collapsed']}" for row in of),
        ]
        for (column, arm, rate), of in sorted(
            every.items(), key=lambda each: (order[0].index(each[0][0]), order[1].index(each[0][1]), each[0][2])
        )
    ]
    names = ["column", "arm", "rate", "mean rate", "turns outside", "CPU seconds", "score of each seed, * collapsed"]
    blocks += [EVERY, table(names, lines, 2)]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _described(regime: Any) -> str:
    return (
        f"{regime.description}; {regime.world.description}. {regime.rollouts} rollouts of {regime.trajectories} "
        f"trajectories, learning rate {regime.learning_rate:g}."
    )
