"""Pictures of the documentation that matplotlib draws: `python docs/plots.py`, from benchmarks/results/*.json."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
BASELINE = "black"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00")
"""Okabe and Ito's: colour-blind people tell them apart."""
REGIMES = ("gentle", "many_updates", "high_rate", "late", "ahead_0", "ahead_2", "ahead_8")
DRAWN = (
    {"staleness": 0, "order": "dataset", "stragglers": False},
    {"staleness": 2, "order": "dataset", "stragglers": False},
    {"staleness": 2, "order": "completed", "stragglers": True},
)
"""Cases of `benchmarks.async_speed`."""


def by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {name: [row for row in rows if row["method"] == name] for name in dict.fromkeys(r["method"] for r in rows)}


def tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.tick_params(labelsize=8, length=2)
    axis.set_axisbelow(True)


def real_model(rows: Sequence[Row]) -> Figure:
    """The mean reward of each rollout, a panel per regime: of a method the mean over seeds, and its runs, pale."""
    regimes = {name: [row for row in rows if row["regime"] == name and row["judging"]] for name in REGIMES}
    regimes = {name: of for name, of in regimes.items() if of}
    methods = list(dict.fromkeys(row["method"] for of in regimes.values() for row in of))
    figure = Figure(figsize=(3.0 * len(regimes), 3.2), layout="constrained")
    axes = figure.subplots(1, len(regimes), squeeze=False, sharey=True)[0]
    for axis, (regime, of) in zip(axes, regimes.items(), strict=True):
        for name, runs in by_method(of).items():
            colour = BASELINE if name == "grpo" else COLOURS[methods.index(name) % len(COLOURS)]
            style = "--" if methods.index(name) >= len(COLOURS) else "-"
            curves = [row["rollout_rewards"] for row in runs]
            for curve in curves:
                axis.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.25, linewidth=0.8)
            means = [statistics.fmean(each) for each in zip(*curves, strict=True)]
            axis.plot(range(1, len(means) + 1), means, style, color=colour, linewidth=1.8, label=name)
        axis.set_title(regime, fontsize=10)
        axis.set_ylim(0, 1)
        tidy(axis)
    axes[0].set_ylabel("mean reward of a rollout", fontsize=9)
    figure.supxlabel("rollout", fontsize=9)
    shown = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside right center", fontsize=8, frameon=False)
    return figure


def asynchronous(rows: Sequence[Row]) -> Figure:
    """Timelines of the last run of three cases."""
    runs = [row for row in rows if "spans" in row]
    last = [[row for row in runs if all(row[k] == v for k, v in case.items())][-1:] for case in DRAWN]
    found = [each[0] for each in last if each]
    placed = [lanes_of(row["spans"]["samples"]) for row in found]
    heights = [3 + max(lane for lane, _ in each) for each in placed]
    figure = Figure(figsize=(9, 0.25 * sum(heights) + 2))
    axes = figure.subplots(len(found), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    colours = {"samples": "#1f77b4", "trains": "#2ca02c", "waits": "#d62728"}
    for axis, row, lanes in zip(axes[:, 0], found, placed, strict=True):
        for lane, (start, end) in lanes:
            axis.broken_barh([(start, end - start)], (2 + lane, 0.8), color=colours["samples"], linewidth=0)
        spans = row["spans"]
        stood = spans["waits"] if row["staleness"] else spans["samples"]
        # A training step begins with its rollout, or by waiting for it.
        trains = [(max([start, *(e for s, e in stood if start <= s <= end)]), end) for start, end in spans["trains"]]
        for place, kind, bars in ((1, "trains", trains), (0, "waits", spans["waits"])):
            widths = [(start, end - start) for start, end in bars]
            axis.broken_barh(widths, (place, 0.8), color=colours[kind], linewidth=0)
        axis.set_yticks([0.4, 1.4, 2.4], ["waits", "trains", "samples"])
        name = f"staleness {row['staleness']}, order {row['order']}" if row["staleness"] else "synchronous"
        axis.set_title(name + (", stragglers" if row["stragglers"] else ""), loc="left", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    return figure


def lanes_of(spans: list[tuple[float, float]]) -> list[tuple[int, tuple[float, float]]]:
    """Each span with a lane in which it overlaps no other."""
    free, placed = list[float](), []
    for start, end in sorted(spans):
        lane = next((i for i, until in enumerate(free) if until <= start), len(free))
        free[lane : lane + 1] = [end]
        placed.append((lane, (start, end)))
    return placed


if __name__ == "__main__":
    for rows, picture, drawn, options in (
        ("nine_methods", "real_model.svg", real_model, {}),
        ("async", "async.png", asynchronous, {"dpi": 110}),
    ):
        found = json.loads((ROOT / f"benchmarks/results/{rows}.json").read_text())
        drawn(found).savefig(ROOT / "docs/pictures" / picture, **options)
