"""Training curves as a PNG: a panel per metric, a colour per run."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from sorl_trl.diagnostics.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS = (
    "reward",
    "rewards/exact_match_reward/mean",
    "clip_ratio/region_mean",
    "kl_to_old",
    "lr_factor",
    "turns/ratio_max",
    "kl",
    "entropy",
    "grad_norm",
    "turns/per_trajectory",
    "rollout/searches_per_trajectory",
    "rollout/invalid_actions_per_trajectory",
    "completions/mean_length",
    "critic/explained_variance",
    "critic/value_loss",
    "learning_rate",
)
"""Metrics of docs/metrics.md, in the order of their panels; those that no run has are left out."""
LOGARITHMIC = {"kl_to_old": 1e-3, "kl": 1e-3, "turns/ratio_max": 1.0, "grad_norm": 1e-2}
"""Metrics that may span decades, and the value below which their axis is linear, so that it can show 0."""
COLUMNS = 4
PANEL_WIDTH, PANEL_HEIGHT = 3.7, 2.45
"""The size of a panel, in inches."""
CAPTION = "optimizer step  ·  line: moving average  ·  faint: as logged"


def draw_runs(runs: Sequence[Run]) -> bytes:
    """Draw the curves of one or several runs as a PNG, with their names above all panels.

    Raises:
        ImportError: Matplotlib is not installed.
        ValueError: No run has any of the metrics.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'sorl-trl[plot]'") from error
    metrics = [metric for metric in METRICS if any(run.series(metric).values for run in runs)]
    if not metrics:
        names = ", ".join(repr(run.name) for run in runs)
        raise ValueError(f"No entry of the logs of {names} has a metric of {', '.join(METRICS)}.")
    columns = min(len(metrics), COLUMNS)
    rows = -(-len(metrics) // columns)
    size = (columns * PANEL_WIDTH, rows * PANEL_HEIGHT + 0.6 + 0.22 * len(runs))
    figure = Figure(figsize=size, layout="constrained")
    for position, metric in enumerate(metrics, 1):
        _draw_panel(figure.add_subplot(rows, columns, position), metric, runs)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", frameon=False)
    evaluated = any(run.series(f"eval_{metric}").values for run in runs for metric in metrics)
    figure.supxlabel(CAPTION + "  ·  circles: evaluation" * evaluated, fontsize=9)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    return picture.getvalue()


def _draw_panel(axis: Axes, metric: str, runs: Sequence[Run]) -> None:
    for index, run in enumerate(runs):
        color = f"C{index}"
        logged, evaluated = run.series(metric), run.series(f"eval_{metric}")
        average = logged.smoothed()
        name = " " + run.name.replace("$", r"\$")  # legends leave out names that begin with an underscore
        axis.plot(logged.steps, logged.values, ".", markersize=3, color=color, alpha=0.35)
        axis.plot(average.steps, average.values, color=color, linewidth=1.8, label=name)
        axis.plot(evaluated.steps, evaluated.values, "o", color=color, markeredgecolor="white")
    if metric in LOGARITHMIC:
        axis.set_yscale("symlog", linthresh=LOGARITHMIC[metric])
    axis.set_title(metric, loc="left", fontsize=10, fontweight="bold")
    axis.set_xlim(left=0)
    axis.locator_params(axis="x", integer=True)
    axis.grid(color="#e5e7eb")
    axis.spines[["top", "right", "left"]].set_visible(False)
