"""Rollouts as a PNG: a line per row, and along it in colours what the row was doing."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING

from sorl_trl.diagnostics.plots import FAINT, GRID, INK
from sorl_trl.diagnostics.rollout_times import PHASES, RolloutTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IDLE = "#DADDE2"
PHASE_COLORS = {"prefill": "#D55E00", "decode": "#0072B2", "search": "#E69F00", "idle": IDLE}
"""Of Okabe and Ito; they differ in lightness too."""
LEAST_WIDTH = 1 / 600
"""Of a prefill, as a share of the picture: it is drawn no thinner, or nobody would see it."""
WIDTH = 10.0
HEADER = 1.1
"""In inches: above and below the rows of one rollout."""


def draw_rollouts(rollouts: Mapping[str, RolloutTimes]) -> bytes:
    """The PNG of rollouts, one below the other, all with the same axis of seconds.

    Args:
        rollouts: What each is called, and where its time went.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There is none.
    """
    if not rollouts:
        raise ValueError("`rollouts` is empty, but must hold at least one rollout.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'sorl-trl[plot]'") from error
    heights = [rows_height(times.rows) + HEADER for times in rollouts.values()]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.4))
    figure.set_layout_engine("constrained", h_pad=0.1)
    axes = figure.subplots(len(rollouts), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    seconds = max(times.seconds for times in rollouts.values())
    for axis, (name, times) in zip(axes, rollouts.items(), strict=True):
        _draw_rows(axis, times, seconds)
        _dress(axis, name, times)
    axes[-1].set_xlabel("seconds since the rollout began", fontsize=9, color=FAINT)
    axes[-1].set_xlim(0, seconds or 1)
    _explain(figure)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    return picture.getvalue()


def rows_height(rows: int) -> float:
    """Inches for so many rows: 0.16 for each of a few, and less for many, as long as one can tell them apart."""
    return min(max(0.16 * rows, 0.8), max(2.6, 0.045 * rows))


def bars(times: RolloutTimes, phase: str, seconds: float) -> tuple[list[tuple[float, float]], list[float]]:
    """Begin and length of each bar of a phase, and their rows; `seconds` is the length of the axis.

    A "wait" is a bar across all rows, over what decodes; where a row has "ended", nothing is shown.
    """
    every_row = [float(row) for row in range(times.rows)]
    if phase == "idle":  # behind all others, up to the end of the trajectory
        return [(0.0, end) for end in times.ended_s], every_row
    if phase == "ended":
        return [(end, seconds - end) for end in times.ended_s], every_row
    if phase == "wait":
        return [(start, end - start) for start, end in times.waits], [(times.rows - 1) / 2] * len(times.waits)
    least = LEAST_WIDTH * seconds if phase == "prefill" else 0.0
    spans = [(row, start, end) for row, name, start, end in times.spans if name == phase]
    return [(start, max(end - start, least)) for _, start, end in spans], [float(row) for row, _, _ in spans]


def _draw_rows(axis: Axes, times: RolloutTimes, seconds: float) -> None:
    thickness = 0.78 if rows_height(times.rows) / max(times.rows, 1) > 0.07 else 1.0
    for phase in ("idle", "decode", "wait", "ended", "search", "prefill"):
        lengths, rows = bars(times, phase, seconds)
        lefts, widths = [left for left, _ in lengths], [width for _, width in lengths]
        height = times.rows if phase == "wait" else 1.0 if phase == "ended" else thickness
        color = {**PHASE_COLORS, "wait": IDLE, "ended": "white"}[phase]
        axis.barh(rows, widths, height, lefts, color=color, linewidth=0)
    axis.set_ylim(times.rows - 0.5, -0.5)


def _dress(axis: Axes, name: str, times: RolloutTimes) -> None:
    title = (
        f"{name}: {times.rows} rows, {times.seconds:.3g} s" if name else f"{times.rows} rows, {times.seconds:.3g} s"
    )
    axis.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=17, parse_math=False)
    axis.text(0, 1, summary(times), transform=axis.transAxes, fontsize=8.5, color=FAINT, va="bottom")
    axis.set_ylabel("row", fontsize=9, color=FAINT)
    axis.tick_params(which="both", labelsize=8, colors=FAINT, length=0, labelbottom=True)
    axis.locator_params(axis="y", integer=True)
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(GRID)


def summary(times: RolloutTimes) -> str:
    """What the rollout, and then what its rows spent their time on."""
    whole = {
        "generating": times.seconds_generating,
        "searching": times.seconds_searching,
        "standing still for a reply": times.seconds_waiting,
    }
    parts = [f"{seconds / times.seconds if times.seconds else 0:.0%} {what}" for what, seconds in whole.items()]
    shares = times.shares()
    rows = [f"{share:.0%} {phase}" for phase, share in shares.items()]
    return f"the rollout: {', '.join(parts)}  ·  its rows: {', '.join(rows)}"


def _explain(figure: Figure) -> None:
    from matplotlib.patches import Patch

    names = {phase: phase for phase in PHASES} | {"idle": "idle: waits for others"}
    handles = [Patch(color=PHASE_COLORS[phase], label=name) for phase, name in names.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9)
