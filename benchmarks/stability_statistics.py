"""What the stability benchmark concludes from its runs: pure functions, and no opinion on which method is ours.

A record is what the runner archives of one run; `read_runs` makes a `Run` of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.method_settings import Method
    from benchmarks.stability_grid import Regime

LAST = 5
"""Rollouts at the end whose evaluations make the final EM."""
MARGIN = 0.1
"""A learning rate whose final EM on the first choosing seed is further below the best is out of the question."""
INFINITE = 1e308
"""JSON has no infinity: records and `stability.json` write this number, records also the word "inf"."""

Record = Mapping[str, Any]
Cell = tuple[str, str, float]
"""Regime, method, learning rate."""
Table = dict[str, "list[Run]"]
"""Method to its runs, of the methods that have any."""


@dataclass(frozen=True)
class Grid:
    """The plan of the benchmark.

    Args:
        regimes: name to regime, in the order of the report.
        methods: name to method, in the order of the report; each family's baseline is named like the family.
        common_learning_rate: of each regime.
        choices: of each regime, the learning rates that a method may choose from; none: it has the common one.
        choosing_seeds: choose each method's learning rate, and enter no result.
        judging_seeds: make the results.
    """

    regimes: Mapping[str, Regime]
    methods: Mapping[str, Method]
    common_learning_rate: Mapping[str, float]
    choices: Mapping[str, Sequence[float]]
    choosing_seeds: Sequence[int]
    judging_seeds: Sequence[int]

    @property
    def tuned(self) -> list[str]:
        """The methods whose own learning rate is looked for: none without seeds to choose it."""
        return [name for name, method in self.methods.items() if method.tuned and self.choosing_seeds]

    def methods_in(self, regime: str) -> list[str]:
        """The methods that are run in a regime, in the order of the report."""
        named = self.regimes[regime].methods
        return [name for name in self.methods if not named or name in named]

    def common(self, regime: str) -> float:
        """The regime's common learning rate."""
        return rounded(self.common_learning_rate[regime])

    def learning_rates(self, regime: str) -> list[float]:
        """The learning rates that a method may choose from, ascending."""
        return sorted(map(rounded, self.choices[regime]))


def published_grid() -> Grid:
    """The grid of `benchmarks.stability_grid` and `stability_methods`."""
    # Here, not above: the grid knows the trainers' settings, and statistics shall not need the trainers.
    from benchmarks import stability_grid as grid
    from benchmarks.stability_methods import METHODS

    return Grid(
        regimes=grid.REGIMES,
        methods=METHODS,
        common_learning_rate=grid.COMMON_LEARNING_RATE,
        choices={name: regime.learning_rates for name, regime in grid.REGIMES.items()},
        choosing_seeds=grid.CHOOSING_SEEDS,
        judging_seeds=grid.JUDGING_SEEDS,
    )


def rounded(learning_rate: float) -> float:
    """Three digits: 0.3 × 5e-4 and 1.5e-4 are the same learning rate, whatever their last bits say."""
    return float(f"{learning_rate:.3g}")


def number(value: float | str | None) -> float | None:
    """A figure of a record: `None` for one that is missing or not a number, infinity for "inf" and for `INFINITE`."""
    if value is None or math.isnan(figure := float(value)):
        return None
    return math.copysign(math.inf, figure) if abs(figure) >= INFINITE else figure


@dataclass(frozen=True)
class Run:
    """One run and what became of it; figures are `None` where the run has none.

    A run that died (`error`) ends with an EM of 0 and has collapsed.
    """

    record: Record

    @cached_property
    def cell(self) -> Cell:
        return self.record["regime"], self.record["method"], rounded(self.record["learning_rate"])

    @property
    def seed(self) -> int:
        return int(self.record["seed"])

    @property
    def harness(self) -> int:
        """The version of the benchmark's code that evaluated it."""
        return int(self.record["harness"])

    @property
    def error(self) -> str | None:
        """Why the run died."""
        error: str | None = self.record["error"]
        return error

    @property
    def stopped_at(self) -> int | None:
        """The rollout after which a guard stopped it."""
        stopped: int | None = self.record.get("stopped_at")
        return stopped

    @property
    def start(self) -> float | None:
        """Sampled EM of the policy that the run started from."""
        first = [entry["sampled_em"] for entry in self.record["evaluations"] if entry["rollout"] == 0]
        return first[0] if first else None

    @property
    def best(self) -> float:
        """Sampled EM of the best single evaluation."""
        return max((entry["sampled_em"] for entry in self.record["evaluations"]), default=0.0)

    def final(self, score: str) -> float:
        """Mean of `score` ("sampled_em" or "greedy_em") over the evaluations after the last five rollouts.

        Of a run that was stopped, the score of the policy that it left.
        """
        if self.error:
            return 0.0
        evaluations = self.record["evaluations"]
        if self.stopped_at is not None:
            return float(evaluations[-1][score])
        last = max(entry["rollout"] for entry in evaluations)
        return statistics.fmean(entry[score] for entry in evaluations if entry["rollout"] > max(0, last - LAST))

    @cached_property
    def collapsed(self) -> bool:
        """Died, or the final sampled EM is below the start's or below half of the best evaluation's."""
        final = self.final("sampled_em")
        return bool(self.error) or final < max(self.start or 0.0, self.best / 2)

    def metric(self, key: str) -> list[float]:
        """A training metric, rollout by rollout, without the rollouts that have none."""
        figures = [number(rollout.get(key)) for rollout in self.record["rollouts"]]
        return [figure for figure in figures if figure is not None]


def read_runs(records: Iterable[Record], grid: Grid) -> list[Run]:
    """Check the records and order them by seed.

    Raises:
        ValueError: a record's regime, method or seed is not in `grid`; two records are of the same run; or a run that
            did not die lacks the evaluation before training or any after it.
    """
    seeds = [*grid.choosing_seeds, *grid.judging_seeds]
    allowed: dict[str, Sequence[Any]] = {"regime": list(grid.regimes), "method": list(grid.methods), "seed": seeds}
    runs: dict[tuple[Cell, int], Run] = {}
    for record in records:
        for field, values in allowed.items():
            if record[field] not in values:
                raise ValueError(f"A record's `{field}` is {record[field]!r}; allowed are {values}.")
        run = Run(record)
        if (run.cell, run.seed) in runs:
            raise ValueError(f"`records` has two runs of {run.cell} with seed {run.seed}; one is allowed.")
        evaluated = [entry["rollout"] for entry in record["evaluations"]]
        if not run.error and (0 not in evaluated or max(evaluated) == 0):
            raise ValueError(
                f"The `evaluations` of {run.cell}, seed {run.seed}, are after rollouts {evaluated}; "
                "rollout 0 and at least one later are needed."
            )
        runs[run.cell, run.seed] = run
    return sorted(runs.values(), key=lambda run: run.seed)


def in_cell(runs: Iterable[Run], cell: Cell, seeds: Sequence[int]) -> list[Run]:
    """The runs of a cell with one of `seeds`."""
    return [run for run in runs if run.cell == cell and run.seed in seeds]


def choosing_scores(runs: Sequence[Run], grid: Grid, regime: str, method: str) -> dict[float, list[Run]]:
    """Learning rate to its choosing runs, ascending, where the grid or a run has that learning rate."""
    tried = {run.cell[2] for run in runs if run.cell[:2] == (regime, method) and run.seed in grid.choosing_seeds}
    rates = sorted(tried.union(grid.learning_rates(regime)))
    return {rate: in_cell(runs, (regime, method, rate), grid.choosing_seeds) for rate in rates}


def mean_final(runs: Iterable[Run], score: str = "sampled_em") -> float:
    return statistics.fmean(run.final(score) for run in runs)


def choosing_plan(runs: Sequence[Run], grid: Grid, regime: str, method: str) -> list[tuple[float, int]]:
    """Learning rate and seed of the choosing runs that a method needs, as far as `runs` tell.

    On the first seed every learning rate is tried; on the others, those that came within `MARGIN` of the best there,
    unless that is a single one.
    """
    if method not in grid.tuned or method not in grid.methods_in(regime):
        return []
    first, *others = grid.choosing_seeds
    tried = choosing_scores(runs, grid, regime, method)
    plan = [(rate, first) for rate in tried]
    finals = {rate: run.final("sampled_em") for rate, of_rate in tried.items() for run in of_rate if run.seed == first}
    if not finals or len(finals) < len(tried):
        return plan
    close = [rate for rate, final in finals.items() if final >= max(finals.values()) - MARGIN]
    return plan + [(rate, seed) for rate in close for seed in others if len(close) > 1]


def choose_learning_rates(records: Iterable[Record], grid: Grid | None = None) -> dict[tuple[str, str], float]:
    """Each method's best learning rate in each regime.

    The best has the highest mean final sampled EM over the choosing seeds, of those in question on all of them
    (`choosing_plan`); of equals, the lowest is taken. A method whose choosing runs are not complete has no entry.

    Args:
        records: of any runs; those with a judging seed have no say.
        grid: the published one unless given.

    Returns:
        (regime, method) -> learning rate, rounded to three digits.
    """
    grid = grid or published_grid()
    return choose(read_runs(records, grid), grid)


def choose(runs: Sequence[Run], grid: Grid) -> dict[tuple[str, str], float]:
    """`choose_learning_rates` of runs that are read."""
    chosen = {}
    for regime in grid.regimes:
        for method in grid.tuned:
            plan = choosing_plan(runs, grid, regime, method)
            tried = choosing_scores(runs, grid, regime, method)
            asked = {rate: [run for run in tried[rate] if (rate, run.seed) in plan] for rate, _ in plan}
            if asked and sum(map(len, asked.values())) == len(plan):
                # Nine digits: means that differ in their last bits are equal.
                score = {rate: (len(of_rate), round(mean_final(of_rate), 9)) for rate, of_rate in asked.items()}
                chosen[regime, method] = max(score, key=lambda rate: (*score[rate], -rate))
    return chosen


def judged(runs: Sequence[Run], grid: Grid) -> dict[tuple[str, bool], Table]:
    """(regime, tuned) -> the judging runs at the common, or at each method's own, learning rate."""
    chosen = choose(runs, grid)
    tables: dict[tuple[str, bool], Table] = {}
    for regime in grid.regimes:
        for tuned in (False, True):
            rates = {method: chosen.get((regime, method)) if tuned else grid.common(regime) for method in grid.methods}
            found = {
                method: in_cell(runs, (regime, method, rate), grid.judging_seeds)
                for method, rate in rates.items()
                if rate is not None
            }
            tables[regime, tuned] = {method: of_method for method, of_method in found.items() if of_method}
    return tables
