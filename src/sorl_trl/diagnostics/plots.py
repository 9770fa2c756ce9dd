"""Training curves as a PNG: a panel per metric, a colour per run or per method of several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sorl_trl.diagnostics.run_groups import Group, group_runs
from sorl_trl.diagnostics.runs import SMOOTHED_FROM, LogHistory, Run, Series
from sorl_trl.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


@dataclass(frozen=True)
class Panel:
    """What one panel shows.

    Args:
        title: The metric in plain words.
        metric: Its name in docs/metrics.md.
        evaluated: Show evaluations as dots. Of the ratios they say nothing: their data is always on-policy.
        logarithmic: It may span decades: its axis is logarithmic where its moving averages span more than two.
        skip_constant: Leave the panel out where all runs have one and the same value throughout.
    """

    title: str
    metric: str
    evaluated: bool = True
    logarithmic: bool = False
    skip_constant: bool = False


PANELS = (
    Panel("Reward", "reward"),
    Panel("Exact match", "rewards/exact_match_reward/mean"),
    Panel("Clip fraction of tokens", "clip_fraction/token", evaluated=False),
    Panel("Clip fraction of turns", "clip_fraction/turn", evaluated=False),
    Panel("Clip fraction of sequences", "clip_fraction/sequence", evaluated=False),
    Panel("Stopped by the clip", "clip_ratio/region_mean", evaluated=False),
    Panel("KL to the old policy", "kl_to_old", evaluated=False, logarithmic=True),
    Panel("Largest turn ratio", "turns/ratio_max", evaluated=False, logarithmic=True),
    Panel("KL to the reference", "kl", logarithmic=True),
    Panel("Entropy", "entropy"),
    Panel("Gradient norm", "grad_norm", logarithmic=True),
    Panel("Turns", "rollout/turns_per_trajectory"),
    Panel("Searches", "rollout/searches_per_trajectory"),
    Panel("Invalid actions", "rollout/invalid_actions_per_trajectory"),
    Panel("Tokens of a completion", "completions/mean_length"),
    Panel("Explained variance of the critic", "critic/explained_variance"),
    Panel("Mean value", "critic/value_mean"),
    Panel("Mean return", "critic/return_mean"),
    Panel("Value loss", "critic/value_loss", logarithmic=True),
    Panel("Learning rate", "learning_rate", logarithmic=True, skip_constant=True),
)
"""In the order in which they are drawn; those that no run has are left out."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A3D9A", "#8C564B")
"""Of Okabe and Ito, which colour-blind readers tell apart, and two more."""
DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
"""After each eight lines colours begin again, with the next kind of line."""
FEW = 5
"""Of so many lines each is drawn as it was logged, too; of more, averages alone can be told apart."""

INK, FAINT, GRID = "#1f2328", "#6b7280", "#e5e7eb"
PANEL_WIDTH, PANEL_HEIGHT = 3.7, 2.45
"""In inches."""
LEGEND_LINE = 0.22
"""Inches that a line of the legend is high: the picture grows with it, and panels keep their height."""
SHOWN_DECADES = 6
"""Below its largest value, a logarithmic axis goes no further down: rounding is not worth the room."""


def plot_training(log_history: LogHistory, path: str | Path, title: str = "") -> Path:
    """Draw the curves of one run.

    Args:
        log_history: `trainer.state.log_history`, or that of a `trainer_state.json`.
        path: the PNG to write.
        title: above all panels.

    Returns:
        `path`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: `log_history` holds none of the metrics.
    """
    write_whole(Path(path), draw_runs([Run(title, log_history)]))
    return Path(path)


def draw_runs(runs: Sequence[Run], by_name: bool = False) -> bytes:
    """The PNG of the curves of one or several runs, with their names above all panels.

    Seeds of one method are one line, their mean, in a band from the lowest to the highest of them.

    Args:
        runs: With different names.
        by_name: As in `group_runs`, which says what seeds of one method are.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: No run has any of the metrics.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'sorl-trl[plot]'") from error
    panels, groups = visible_panels(runs), group_runs(runs, by_name)
    columns = columns_for(len(panels))
    rows = -(-len(panels) // columns)
    legend_columns = legend_columns_for(groups, columns * PANEL_WIDTH)
    legend_rows = -(-len(groups) // legend_columns)
    figure = Figure(figsize=(columns * PANEL_WIDTH, rows * PANEL_HEIGHT + 0.6 + LEGEND_LINE * legend_rows))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axis in grid[len(panels) :]:
        axis.remove()
    for axis, panel in zip(grid, panels, strict=False):
        _draw_panel(axis, panel, groups)
    _name_groups(figure, groups, legend_columns)
    figure.supxlabel(_caption(groups, panels), fontsize=9, color=FAINT)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    return picture.getvalue()


def visible_panels(runs: Sequence[Run]) -> list[Panel]:
    """The panels for which at least one run has a value.

    Raises:
        ValueError: There are none.
    """
    panels = [panel for panel in PANELS if _is_visible(panel, runs)]
    if not panels:
        entries = ", ".join(f"{run.name!r} has {len(run.log_history)}" for run in runs)
        names = ", ".join(panel.metric for panel in PANELS)
        raise ValueError(f"No entry of any `log_history` ({entries} entries) has a metric of {names}.")
    return panels


def columns_for(panels: int) -> int:
    """Four or three, whichever leaves fewer places empty; but one row for fewer panels than that."""
    return min(panels, 4 if -panels % 4 <= -panels % 3 else 3)


def legend_columns_for(groups: Sequence[Group], width: float) -> int:
    """So many names stand side by side in a legend of that width in inches."""
    longest = max(len(group.name) for group in groups)
    return max(1, min(len(groups), int(width * 11) // (longest + 6)))


def color_of(index: int) -> str:
    """The colour of a line; they repeat after eight."""
    return COLORS[index % len(COLORS)]


def dashes_of(index: int) -> Literal["-", "--", ":", "-."]:
    """The kind of line, another one for each eight lines; with the colour it tells 32 apart."""
    return DASHES[index // len(COLORS) % len(DASHES)]


def spans_decades(curves: Sequence[Series], decades: float = 2.0) -> bool:
    """Whether the largest value is more than `decades` powers of ten above the smallest positive one."""
    positive = [value for curve in curves for value in curve.values if value > 0]
    return bool(positive) and max(positive) > 10**decades * min(positive)


def _evaluations(run: Run, panel: Panel) -> Series:
    return run.series(f"eval_{panel.metric}") if panel.evaluated else Series((), ())


def _is_visible(panel: Panel, runs: Sequence[Run]) -> bool:
    shown = [series for run in runs for series in (run.series(panel.metric), _evaluations(run, panel))]
    values = {value for series in shown for value in series.values}
    return len(values) > (1 if panel.skip_constant else 0)


def _draw_panel(axis: Axes, panel: Panel, groups: Sequence[Group]) -> None:
    for index, group in enumerate(groups):
        if len(group.runs) > 1:
            _draw_band(axis, group, panel.metric, index)
        else:
            _draw_curve(axis, group.runs[0].series(panel.metric), index, with_raw=len(groups) <= FEW)
        for run in group.runs:
            dots = _evaluations(run, panel)
            axis.plot(dots.steps, dots.values, "o", ms=5.5, color=color_of(index), mec="white", mew=0.8, zorder=4)
    runs = [run for group in groups for run in group.runs]
    averages = [run.series(panel.metric).smoothed() for run in runs]
    logarithmic = panel.logarithmic and spans_decades(averages)
    if logarithmic:
        positive = [value for average in averages for value in average.values if value > 0]
        axis.set_yscale("log")
        axis.set_ylim(bottom=max(min(positive) / 2, max(positive) / 10**SHOWN_DECADES))
    axis.set_xlim(0, max(run.last_step for run in runs) * 1.02 or 1)
    _dress(axis, panel, logarithmic)


def _draw_band(axis: Axes, group: Group, metric: str, index: int) -> None:
    """The mean of the moving averages of a group's runs, from the lowest to the highest of them."""
    spread = group.spread(metric)
    axis.fill_between(spread.steps, spread.low, spread.high, color=color_of(index), alpha=0.15, linewidth=0)
    marker = "." if len(spread.steps) < SMOOTHED_FROM else ""
    axis.plot(
        spread.steps, spread.mean, dashes_of(index), color=color_of(index), linewidth=1.8, marker=marker, zorder=3
    )


def _draw_curve(axis: Axes, curve: Series, index: int, with_raw: bool) -> None:
    """A thick moving average over a thin line of what was logged, or where points are few, those points."""
    average = curve.smoothed()
    is_short = len(curve.values) < SMOOTHED_FROM
    if with_raw and not is_short:
        axis.plot(curve.steps, curve.values, color=color_of(index), linewidth=0.8, alpha=0.35)
    axis.plot(
        average.steps,
        average.values,
        dashes_of(index),
        color=color_of(index),
        linewidth=1.8,
        marker="." if is_short else "",
        zorder=3,
    )


def _dress(axis: Axes, panel: Panel, logarithmic: bool) -> None:
    axis.set_title(panel.title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=17)
    subtitle = f"{panel.metric}, log scale" if logarithmic else panel.metric
    axis.text(0, 1.035, subtitle, transform=axis.transAxes, fontsize=7.5, family="monospace", color=FAINT)
    axis.tick_params(which="both", labelsize=8, colors=FAINT, length=0)
    axis.locator_params(axis="x", integer=True)
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(GRID)


def _name_groups(figure: Figure, groups: Sequence[Group], columns: int) -> None:
    """A common legend, or for one line its name as the title; names are text, and not TeX between dollar signs."""
    if len(groups) == 1:
        figure.suptitle(groups[0].name, fontsize=12, color=INK, parse_math=False)
        return
    handles = [_legend_line(index) for index in range(len(groups))]
    # Names come in afterwards: the legend of matplotlib 3.9 leaves out what begins with an underscore.
    labels = [str(index) for index in range(len(groups))]
    legend = figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=10)
    for text, group in zip(legend.get_texts(), groups, strict=True):
        text.set_parse_math(False)
        text.set_text(group.name)


def _legend_line(index: int) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color_of(index), linestyle=dashes_of(index), linewidth=2.5)


def _caption(groups: Sequence[Group], panels: Sequence[Panel]) -> str:
    """What the horizontal axis and the kinds of line are, as far as they occur."""
    drawn = [(run, panel) for group in groups for run in group.runs for panel in panels]
    parts = ["optimizer step"]
    is_long = any(len(run.series(panel.metric).values) >= SMOOTHED_FROM for run, panel in drawn)
    if is_long and len(groups) <= FEW and any(len(group.runs) == 1 for group in groups):
        parts.append("thin: as logged, thick: moving average")
    elif is_long:
        parts.append("moving averages")
    if any(len(group.runs) > 1 for group in groups):
        parts.append("band: from the lowest to the highest of several runs, line: their mean")
    if any(_evaluations(run, panel).values for run, panel in drawn):
        parts.append("dots: evaluation")
    return "  ·  ".join(parts)
