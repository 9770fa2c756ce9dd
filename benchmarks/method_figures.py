"""The picture of a method's page: sampled EM over rollouts, of the method, of the baseline and of our defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.stability_figures import BASELINE, PANELS, matrix, new_figure, tidy
from benchmarks.stability_statistics import Grid, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

SHOWN = ("reuse", "hunt-reuse")
"""The regimes that are drawn: 32 updates per rollout, in questions and in hunts."""
BASELINES = {"grpo": ("grpo", "so_grpo"), "ppo": ("ppo", "so_ppo")}
"""Family to its baseline, and to our defaults of the family."""
OURS = "#0072B2"
COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
"""Of the page's own rows: with black and blue, those of Okabe and Ito, which colour-blind people tell apart."""


def baselines_of(rows: Iterable[str], grid: Grid) -> tuple[str, ...]:
    """What the rows of a page are compared with: GRPO and our defaults, and with a critic PPO and ours as well."""
    families = {grid.methods[name].family for name in rows if name in grid.methods}
    return BASELINES["grpo"] + (BASELINES["ppo"] if "ppo" in families else ())


def lines_of_family(rows: Sequence[str], family: str, grid: Grid) -> dict[str, str]:
    """Row to colour: the family's baseline, our defaults, then the page's rows of the family."""
    own = [name for name in rows if name in grid.methods and grid.methods[name].family == family]
    lines = dict(zip(BASELINES[family], (BASELINE, OURS), strict=True))
    others = [name for name in own if name not in lines]
    return lines | {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(others)}


def draw_lines(axis: Axes, table: Mapping[str, Sequence[Run]], lines: Mapping[str, str]) -> None:
    """Thick means over seeds, thin seeds."""
    for name, colour in lines.items():
        if name in table:
            rollouts, values = matrix(table[name], PANELS[0])
            axis.plot(rollouts, values.T, color=colour, linewidth=0.6, alpha=0.35)
            axis.plot(rollouts, np.nanmean(values, axis=0), color=colour, linewidth=2.0, zorder=3)
    axis.set_ylim(bottom=0)
    tidy(axis)


def draw_page(
    rows: Sequence[str], by_regime: Mapping[str, Mapping[str, Sequence[Run]]], grid: Grid, path: Path
) -> bool:
    """Write the picture: a row of panels per family, a column per regime of `SHOWN`; whether there was one to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    shown = [regime for regime in SHOWN if any(name in by_regime.get(regime, {}) for name in rows)]
    families = [family for family in BASELINES if any(_is_of(name, family, grid, by_regime, shown) for name in rows)]
    if not families:
        path.unlink(missing_ok=True)
        return False
    figure = new_figure(3.1 * len(shown) + 2.6, 0.4 + 2.5 * len(families))
    axes = figure.subplots(
        len(families), len(shown) + 1, squeeze=False, width_ratios=[*[1.0] * len(shown), 0.75], sharex="col"
    )
    for family, (*panels, margin) in zip(families, axes, strict=True):
        lines = lines_of_family(rows, family, grid)
        for axis, regime in zip(panels, shown, strict=True):
            draw_lines(axis, by_regime[regime], lines)
            axis.set_title(grid.regimes[regime].title, fontsize=10)
        margin.set_axis_off()
        drawn = [name for name in lines if any(name in by_regime[regime] for regime in shown)]
        handles = [_line(lines[name]) for name in drawn]
        titles = [grid.methods[name].title for name in drawn]
        margin.legend(handles, titles, loc="center left", frameon=False, fontsize=8.5, borderaxespad=0)
    for axis in axes[-1][:-1]:
        axis.set_xlabel("rollout", fontsize=9)
    figure.supylabel("sampled EM, unseen world", fontsize=9)
    save_small(figure, path)
    return True


def save_small(figure: Figure, path: Path) -> None:
    """Write a PNG of few colours, a third as large as matplotlib's."""
    from PIL import Image  # comes with matplotlib

    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=75)
    Image.open(picture).convert("RGB").quantize(48).save(path, optimize=True)


def _is_of(
    name: str,
    family: str,
    grid: Grid,
    by_regime: Mapping[str, Mapping[str, Sequence[Run]]],
    regimes: Sequence[str],
) -> bool:
    """Whether a row is of a family and was measured in one of the regimes."""
    measured = any(name in by_regime[regime] for regime in regimes)
    return measured and grid.methods[name].family == family


def _line(colour: str) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linewidth=2.5)
