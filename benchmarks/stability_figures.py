"""The stability benchmark's pictures: curves of one regime, and where every run of every regime ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.stability_statistics import Grid, Run, Table, mean_final, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASELINE = "black"
COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00"),
    *("#56B4E9", "#882255", "#DDCC77", "#117733", "#CC6677"),
)
"""Five of Okabe and Ito's, and five that go with Tol's muted ones: colour-blind people tell each five apart."""
PER_ROW = 5
"""Methods in a row of panels, besides the baseline."""
KL_SHOWN = (1e-6, 1e3)
"""What the logarithmic panel shows of the KL; it is clamped to that, infinity included."""
FAMILY_TITLES = {"grpo": "GRPO family", "ppo": "PPO family"}


@dataclass(frozen=True)
class Panel:
    """A figure of a run, rollout by rollout; `log`: on a logarithmic axis, its mean over seeds taken there."""

    title: str
    key: str
    log: bool = False


PANELS = (
    Panel("sampled EM, unseen world", "sampled_em"),
    Panel("training reward", "reward"),
    Panel("clip fraction, tokens", "clip_fraction/token"),
    Panel("KL to the old policy", "kl_to_old", log=True),
)
LEGEND = "final sampled EM (dot: a run that held, cross: one that collapsed, bar: mean, dashed: before training)"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that needs no display.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'sorl-trl[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def colour_of(method: str, grid: Grid) -> str:
    """The same in every picture: black for a baseline, and one of `COLOURS` by the place in the family."""
    family = grid.methods[method].family
    if method == family:
        return BASELINE
    others = [name for name, other in grid.methods.items() if other.family == family != name]
    return COLOURS[others.index(method) % len(COLOURS)]


def rows_of_methods(table: Table, grid: Grid) -> list[tuple[str, list[str]]]:
    """Family and methods of each row of panels: the family's baseline, then a fair share of its other methods."""
    rows = []
    for family in dict.fromkeys(grid.methods[name].family for name in grid.methods if name in table):
        others = [name for name in grid.methods if name in table and grid.methods[name].family == family != name]
        baseline = [family] if family in table else []
        count = max(1, math.ceil(len(others) / PER_ROW))
        ends = [len(others) * row // count for row in range(count + 1)]
        rows += [(family, [*baseline, *others[start:end]]) for start, end in pairwise(ends)]
    return rows


def series(run: Run, key: str) -> dict[int, float]:
    """Rollout to figure; the evaluations are those of the record, other figures begin at rollout 1."""
    if key == "sampled_em":
        return {entry["rollout"]: entry["sampled_em"] for entry in run.record["evaluations"]}
    figures = ((place, number(rollout.get(key))) for place, rollout in enumerate(run.record["rollouts"], 1))
    return {place: figure for place, figure in figures if figure is not None}


def matrix(runs: Sequence[Run], panel: Panel) -> tuple[list[int], np.ndarray]:
    """The rollouts (T,) that any run has, and the figures (N, T), NaN where a run has none.

    A run that died has an EM of 0 from then on.
    """
    found = [series(run, panel.key) for run in runs]
    rollouts = sorted({rollout for of_run in found for rollout in of_run})
    values = np.array([[of_run.get(rollout, math.nan) for rollout in rollouts] for of_run in found])
    if panel.key == "sampled_em":
        for run, of_run, row in zip(runs, found, values, strict=True):
            if run.error:
                row[np.array(rollouts) > max(of_run, default=-1)] = 0.0
    return rollouts, np.log10(np.clip(values, *KL_SHOWN)) if panel.log else values


def draw_panel(axis: Axes, panel: Panel, methods: Sequence[str], table: Table, grid: Grid) -> None:
    """Mean over seeds and a band from the lowest to the highest, for each of `methods`."""
    for method in methods:
        rollouts, values = matrix(table[method], panel)
        if not rollouts:
            continue
        low, mean, high = (reduce(values, axis=0) for reduce in (np.nanmin, np.nanmean, np.nanmax))
        if panel.log:
            low, mean, high = 10**low, 10**mean, 10**high
        front = 3 if method == grid.methods[method].family else 2
        axis.fill_between(rollouts, low, high, color=colour_of(method, grid), alpha=0.13, linewidth=0)
        axis.plot(rollouts, mean, color=colour_of(method, grid), linewidth=1.8, zorder=front)
    if panel.log:
        axis.set_yscale("log")


def tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.tick_params(labelsize=8, length=2)
    axis.set_axisbelow(True)
    axis.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])


def draw_regime(table: Table, grid: Grid, title: str, path: Path) -> None:
    """Curves of one regime at the common learning rate: a row per few methods, a column per panel.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = rows_of_methods(table, grid)
    figure = new_figure(14.5, 0.9 + 2.35 * len(rows))
    widths = [1.0] * len(PANELS) + [0.5]
    axes = figure.subplots(len(rows), len(widths), squeeze=False, sharex=True, sharey="col", width_ratios=widths)
    for (family, methods), (*panels, margin) in zip(rows, axes, strict=True):
        for axis, panel in zip(panels, PANELS, strict=True):
            draw_panel(axis, panel, methods, table, grid)
            tidy(axis)
        margin.set_axis_off()
        lines = [margin.plot([], [], color=colour_of(method, grid), linewidth=2.5)[0] for method in methods]
        names = [grid.methods[method].title for method in methods]
        legend = margin.legend(lines, names, loc="center left", frameon=False, fontsize=9, borderaxespad=0)
        legend.set_title(FAMILY_TITLES[family], prop={"size": 9, "weight": "bold"})
        legend.set_alignment("left")
    for axis, panel in zip(axes[0], PANELS, strict=False):
        axis.set_title(panel.title, fontsize=10)
    for axis in axes[-1][:-1]:
        axis.set_xlabel("rollout", fontsize=9)
    figure.suptitle(f"{title}, common learning rate: mean over seeds, and from the lowest to the highest", fontsize=12)
    figure.savefig(path, dpi=80)


def draw_ends(axis: Axes, height: float, runs: Sequence[Run], colour: str) -> None:
    """One method in one regime: a dot per run that held, a cross per run that collapsed, a bar for their mean."""
    for run, offset in zip(runs, np.linspace(-0.2, 0.2, len(runs)), strict=True):
        marker, size = ("x", 24) if run.collapsed else ("o", 14)
        # Seeds stand one under the other, so that equal ends stay apart.
        axis.scatter(run.final("sampled_em"), height + offset, marker=marker, s=size, color=colour, linewidths=1.3)
    mean = mean_final(runs)
    axis.plot([mean, mean], [height - 0.36, height + 0.36], color=colour, linewidth=2.6, solid_capstyle="butt")


def draw_summary(common: Mapping[str, Table], grid: Grid, path: Path) -> None:
    """Final sampled EM of every run at the common learning rate: a panel per regime, a line per method.

    Regimes with the same plan of methods stand side by side.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plans: dict[tuple[str, ...], list[str]] = {}
    for regime in common:
        drawn = tuple(name for name in grid.methods_in(regime) if grid.methods[name].drawn)
        plans.setdefault(drawn, []).append(regime)
    shown = [[m for m in plan if any(m in common[regime] for regime in plans[plan])] for plan in plans]
    width, heights = max(map(len, plans.values())), [1 + 0.36 * len(methods) for methods in shown]
    figure = new_figure(2.6 + 2.5 * width, 0.5 + sum(heights))
    axes = figure.subplots(len(plans), width, squeeze=False, sharex=True, sharey="row", height_ratios=heights)
    for row, regimes, methods in zip(axes, plans.values(), shown, strict=True):
        draw_ends_of({regime: common[regime] for regime in regimes}, methods, grid, row)
        for empty in row[len(regimes) :]:
            empty.set_visible(False)
    axes[0, 0].set_xlim(left=-0.02)
    figure.suptitle("Where training ended: sampled EM on an unseen world, common learning rate", fontsize=12)
    figure.supxlabel(LEGEND, fontsize=9)
    figure.savefig(path, dpi=90)


def draw_ends_of(tables: Mapping[str, Table], methods: Sequence[str], grid: Grid, axes: Iterable[Axes]) -> None:
    """A row of panels, a regime in each."""
    families = [grid.methods[method].family for method in methods]
    # Half a line between the families.
    heights = {m: place + 0.5 * (families[place] != families[0]) for place, m in enumerate(methods)}
    for axis, (regime, table) in zip(axes, tables.items(), strict=False):
        starts = [run.start for runs in table.values() for run in runs if run.start is not None]
        if starts:
            axis.axvline(float(np.mean(starts)), color="0.45", linestyle=(0, (3, 2)), linewidth=1)
        for method, runs in table.items():
            draw_ends(axis, heights[method], runs, colour_of(method, grid))
        axis.set_title(grid.regimes[regime].title, fontsize=10)
        tidy(axis)
        if regime == next(iter(tables)):
            axis.set_yticks(list(heights.values()), [grid.methods[method].title for method in methods], fontsize=9)
            axis.invert_yaxis()
