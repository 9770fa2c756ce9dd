"""Training curves as a PNG: a panel per metric, a colour per run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from textwrap import fill
from typing import TYPE_CHECKING

from sorl_trl.diagnostics.runs import Run, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panel:
    """What one panel shows.

    Args:
        title: The metric in plain words.
        metric: Its name in docs/metrics.md.
        evaluated: Show evaluations as dots. Of the ratios they say nothing: their data is always on-policy.
        logarithmic: It may span decades: its axis is logarithmic where its moving averages span more than two.
    """

    title: str
    metric: str
    evaluated: bool = True
    logarithmic: bool = False


PANELS = (
    Panel("Reward", "reward"),
    Panel("Exact match", "rewards/exact_match_reward/mean"),
    Panel("Stopped by the clip", "clip_ratio/region_mean", evaluated=False),
    Panel("KL to the old policy", "kl_to_old", evaluated=False, logarithmic=True),
    Panel("Largest turn ratio", "turns/ratio_max", evaluated=False, logarithmic=True),
    Panel("KL to the reference", "kl", logarithmic=True),
    Panel("Entropy", "entropy"),
    Panel("Gradient norm", "grad_norm", logarithmic=True),
    Panel("Turns", "turns/per_trajectory"),
    Panel("Searches", "rollout/searches_per_trajectory"),
    Panel("Invalid actions", "rollout/invalid_actions_per_trajectory"),
    Panel("Tokens of a completion", "completions/mean_length"),
    Panel("Explained variance of the critic", "critic/explained_variance"),
    Panel("Mean value", "critic/value_mean"),
    Panel("Mean return", "critic/return_mean"),
    Panel("Value loss", "critic/value_loss", logarithmic=True),
    Panel("Learning rate", "learning_rate", logarithmic=True),
)
"""In the order in which they are drawn; those that no run has are left out."""

COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A3D9A", "#8C564B"),
    *("#666666", "#B2DF8A", "#F0027F", "#17BECF"),
)
"""Of Okabe and Ito, which colour-blind readers tell apart, and more."""

FAINT = "#6b7280"
COLUMNS = 4
PANEL_WIDTH, PANEL_HEIGHT = 3.7, 2.45
"""In inches: the picture grows with its panels."""
SHOWN_DECADES = 6
"""Below its largest value, a logarithmic axis goes no further down: rounding is not worth the room."""
CAPTION = "optimizer step  ·  thick: moving average, thin: as logged  ·  dots: evaluation"


def draw_runs(runs: Sequence[Run]) -> bytes:
    """The PNG of the curves of one or several runs, with their names above all panels.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: No run has any of the metrics.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'sorl-trl[plot]'") from error
    panels = visible_panels(runs)
    columns = min(len(panels), COLUMNS)
    rows = -(-len(panels) // columns)
    size = (columns * PANEL_WIDTH, rows * PANEL_HEIGHT + 0.6 + 0.22 * len(runs))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axis in grid[len(panels) :]:
        axis.remove()
    for axis, panel in zip(grid, panels, strict=False):
        _draw_panel(axis, panel, runs)
    _name_runs(figure, runs)
    figure.supxlabel(fill(CAPTION, int(columns * PANEL_WIDTH * 13)), fontsize=9, color=FAINT)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    return picture.getvalue()


def visible_panels(runs: Sequence[Run]) -> list[Panel]:
    """The panels for which at least one run has a value.

    Raises:
        ValueError: There are none.
    """
    panels = [panel for panel in PANELS if any(series.values for run in runs for series in series_of(run, panel))]
    if not panels:
        names = ", ".join(panel.metric for panel in PANELS)
        raise ValueError(
            f"No entry of the logs of {', '.join(repr(run.name) for run in runs)} has a metric of {names}."
        )
    return panels


def series_of(run: Run, panel: Panel) -> tuple[Series, Series]:
    """What a panel shows of a run: the metric in training, and in its evaluations."""
    return run.series(panel.metric), run.series(f"eval_{panel.metric}") if panel.evaluated else Series((), ())


def _draw_panel(axis: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    for index, run in enumerate(runs):
        _draw_run(axis, panel, run, COLORS[index % len(COLORS)])
    averages = [value for run in runs for value in run.series(panel.metric).smoothed().values if value > 0]
    logarithmic = panel.logarithmic and max(averages, default=0) > 100 * min(averages, default=0)
    if logarithmic:
        axis.set_yscale("log")
        axis.set_ylim(bottom=max(min(averages) / 2, max(averages) / 10**SHOWN_DECADES))
    axis.set_xlim(0, max(run.last_step for run in runs) * 1.02 or 1)
    _dress(axis, panel, logarithmic)


def _draw_run(axis: Axes, panel: Panel, run: Run, color: str) -> None:
    """A thick moving average over a thin line of what was logged, or where points are few, those points."""
    logged, dots = series_of(run, panel)
    average = logged.smoothed()
    if average != logged:
        axis.plot(logged.steps, logged.values, color=color, linewidth=0.8, alpha=0.35)
    marker = "." if average == logged else ""
    axis.plot(average.steps, average.values, color=color, linewidth=1.8, marker=marker, zorder=3)
    axis.plot(dots.steps, dots.values, "o", ms=5.5, color=color, mec="white", mew=0.8, zorder=4)


def _dress(axis: Axes, panel: Panel, logarithmic: bool) -> None:
    axis.set_title(panel.title, loc="left", fontsize=10.5, fontweight="bold", pad=17)
    subtitle = f"{panel.metric}, log scale" if logarithmic else panel.metric
    axis.text(0, 1.035, subtitle, transform=axis.transAxes, fontsize=7.5, family="monospace", color=FAINT)
    axis.tick_params(which="both", labelsize=8, colors=FAINT, length=0)
    axis.locator_params(axis="x", integer=True)
    axis.grid(color="#e5e7eb", linewidth=0.8)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _name_runs(figure: Figure, runs: Sequence[Run]) -> None:
    """A common legend, a line per run, or of one run its name as the title; names are text, and not TeX."""
    from matplotlib.lines import Line2D

    if len(runs) == 1:
        figure.suptitle(runs[0].name, fontsize=12, parse_math=False)
        return
    handles = [Line2D([], [], color=COLORS[index % len(COLORS)], linewidth=2.5) for index in range(len(runs))]
    # With a space before it: a legend leaves out what begins with an underscore.
    legend = figure.legend(handles, [f" {run.name}" for run in runs], loc="outside upper center", frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
