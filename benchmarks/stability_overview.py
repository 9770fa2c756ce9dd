"""What the stability report says of its worlds: their policies and turns, and one table over all their regimes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.stability_statistics import Grid, Run

if TYPE_CHECKING:
    from benchmarks.worlds import BenchmarkWorld

Row = dict[str, Any]
SHAPE = {"tokens": "rollout/tokens_per_turn", "turns": "rollout/turns_per_trajectory"}


def regimes_by_world(grid: Grid, have_run: Sequence[str]) -> Iterator[tuple[BenchmarkWorld, list[str]]]:
    """Each world with those of its regimes that have run, in the order of the grid."""
    regimes: dict[str, list[str]] = {}
    for regime in filter(have_run.__contains__, grid.regimes):
        regimes.setdefault(grid.regimes[regime].world.name, []).append(regime)
    for of_world in regimes.values():
        yield grid.regimes[of_world[0]].world, of_world


def first_figures(runs: Sequence[Run], key: str) -> list[float]:
    """A metric of the first rollout of each run that has it: of the policy as it was before training."""
    return [figures[0] for run in runs if (figures := run.metric(key))]


def worlds_text(runs: Sequence[Run], grid: Grid) -> str:
    """A list: of each world its regimes, its policies' parameters, and how long and how many its turns are."""
    lines = []
    for world, regimes in regimes_by_world(grid, [run.cell[0] for run in runs]):
        of_world = [run for run in runs if run.cell[0] in regimes]
        sizes = sorted({run.record["policy_parameters"] for run in of_world})
        parameters = " or ".join(f"{size:,}" for size in sizes)
        titles = ", ".join(grid.regimes[regime].title for regime in regimes)
        tokens, turns = (first_figures(of_world, key) for key in SHAPE.values())
        shape = f"; {_mean(turns)} turns of {_mean(tokens)} tokens" if tokens and turns else ""
        lines.append(f"- **{world.title}** ({titles}): {world.description}. {parameters} parameters{shape}.")
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1f}"


def overview_tables(
    made: Sequence[Row], grid: Grid, cell: Callable[[Row], str], as_table: Callable[..., str]
) -> list[str]:
    """For each world, heading and table of methods by regimes at the common learning rate.

    Args:
        made: the rows of `stability.json`.
        grid: the plan.
        cell: the text of a row.
        as_table: makes Markdown of the names of the columns and the lines of the body.
    """
    common = {(row["method"], row["regime"]): cell(row) for row in made if not row["tuned"]}
    blocks = []
    for world, regimes in regimes_by_world(grid, [regime for _, regime in common]):
        body = [
            [grid.methods[method].title, *(common.get((method, regime), "") for regime in regimes)]
            for method in grid.methods
            if any((method, regime) in common for regime in regimes)
        ]
        titles = [grid.regimes[regime].title for regime in regimes]
        blocks += [f"### {world.title}", as_table(["method", *titles], body)]
    return blocks
