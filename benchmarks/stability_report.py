"""The stability benchmark's report: `stability.json`, `stability.md` and a picture.

Rows are made from the records of runs. Those of what has not been run again stay as `stability.json` has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.stability_grid import CHOOSING_SEEDS, JUDGING_SEEDS, REGIMES
from benchmarks.stability_methods import METHODS
from benchmarks.stability_statistics import (
    RESAMPLES,
    Record,
    Row,
    Run,
    chosen_rate,
    paired,
    rounded,
    summarize,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEY = ("regime", "method", "learning_rate", "tuned")
"""What makes a row."""
BASELINE = "black"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00")
"""Okabe and Ito's: colour-blind people tell them apart."""
HEADER = """# Does it hold? Many short runs under stress

Written by `python -m benchmarks.stability`. Rows whose runs are not in `runs/stability/` are those of earlier runs.
`stability.json` has every row with its seeds, intervals, KL, gradient norms, ratios and differences to GRPO or PPO.

**Final EM** of a run is the mean sampled exact match over the evaluations after its last five rollouts, on a world
that nobody trained on. Cells are means over seeds with 95 % percentile bootstrap intervals ({resamples:,} resamples;
over so few seeds too narrow rather than too wide), and how many runs collapsed.

**A run has collapsed** if its final EM is below that of the policy it started from, or below half of its own best
evaluation. A run that died, of weights that are not numbers, has collapsed with an EM of 0. This was fixed before any
run. The start was evaluated once, on 200 questions (standard error about .03).

**¹ and ²** mark rows of the first two versions of this benchmark, whose evaluations draw other random numbers: they
compare with each other, not with rows of the third. With {methods} methods, one comparison in twenty has an interval
without 0 by chance.

**Seeds** {choosing} chose all settings and learning rates, and enter no result. Seeds {judging} chose no setting of a
method; but that `sequence` is what held best was seen with their runs in view, so that for this they are no test."""
TUNED = """## At each method's own learning rate

Chosen on the choosing seeds of the rates in brackets; * where it is the common one, so that both tables show the same
runs."""


def choose(runs: Sequence[Run], rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """(regime, method) to its own learning rate, as its choosing runs say, or else as a row of earlier runs does."""
    chosen = {(row["regime"], row["method"]): row["learning_rate"] for row in rows if row["tuned"]}
    for name, regime in REGIMES.items():
        for method in (each for each in regime.methods if METHODS[each].tuned):
            rate = chosen_rate(runs, name, method, regime.learning_rates, CHOOSING_SEEDS)
            if rate is not None:
                chosen[name, method] = rate
    return chosen


def make_rows(records: Iterable[Record], earlier: Sequence[Row]) -> list[Row]:
    """The rows of `records` and, where they lack one of its seeds, the `earlier` one; each with its differences."""
    runs = sorted(map(Run, records), key=lambda run: run.seed)
    judging: dict[tuple[str, str, float], list[Run]] = {}
    for run in runs:
        if run.seed in JUDGING_SEEDS:
            judging.setdefault(run.cell, []).append(run)
    rates = [(regime, method, rounded(REGIMES[regime].learning_rate)) for regime, method, _ in judging]
    cells = dict.fromkeys([(cell, False) for cell in rates])
    cells |= dict.fromkeys([((*where, rate), True) for where, rate in choose(runs, earlier).items()])
    made = {_key(row): row for row in earlier}
    for cell, tuned in cells:
        if cell in judging:
            row = {**dict(zip(KEY, (*cell, tuned), strict=True)), **summarize(judging[cell])}
            if {*made.get(_key(row), row)["seeds"]} <= {*row["seeds"]}:  # else the earlier one says more
                made[_key(row)] = row
    return [_with_differences(row, made) for row in sorted(made.values(), key=_place)]


def _key(row: Row) -> tuple[Any, ...]:
    """A method has one row of its own learning rate, whatever that is."""
    rate = "own" if row["tuned"] else row["learning_rate"]
    return row["regime"], row["method"], rate


def _place(row: Row) -> tuple[Any, ...]:
    return [*REGIMES].index(row["regime"]), row["tuned"], [*METHODS].index(row["method"])


def _with_differences(row: Row, rows: Mapping[tuple[Any, ...], Row]) -> Row:
    regime, baseline = row["regime"], METHODS[row["method"]].family
    common = rounded(REGIMES[regime].learning_rate)
    own = rows.get((regime, baseline, "own"))
    beside = own if row["tuned"] else rows.get((regime, baseline, common))
    return {
        **row,
        "same_runs_as_common": row["tuned"] and row["learning_rate"] == common,
        "baseline": baseline,
        "difference": None if row["method"] == baseline else paired(row, beside),
        "difference_to_tuned_baseline": paired(row, own),
    }


def cell(row: Row) -> str:
    """Final EM with its interval, and how many runs collapsed."""
    interval = " [{:.2f}, {:.2f}]".format(*row["sampled_em_interval"]) if row["sampled_em_interval"] else ""
    marks = "".join("¹²"[harness - 1] for harness in row["harnesses"] if harness < 3)
    collapses = f", {row['collapses']} of {len(row['seeds'])}" if row["collapses"] else ""
    return f"{row['sampled_em']:.2f}{interval}{marks}{collapses}"


def tuned_cell(row: Row) -> str:
    return f"{cell(row)} ({row['learning_rate']:g}{'*' if row['same_runs_as_common'] else ''})"


def table(rows: Sequence[Row], as_text: Callable[[Row], str]) -> str:
    """Markdown: methods by regimes."""
    found = {(row["method"], row["regime"]): as_text(row) for row in rows}
    regimes = [name for name in REGIMES if any(regime == name for _, regime in found)]
    lines = [["method", *(REGIMES[name].title for name in regimes)], ["---"] + ["---:"] * len(regimes)]
    for method in (name for name in METHODS if any(name == of for of, _ in found)):
        lines.append([METHODS[method].title, *(found.get((method, regime), "–") for regime in regimes)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def report(rows: Sequence[Row]) -> str:
    """`stability.md`."""
    seeds = {
        "choosing": " and ".join(map(str, CHOOSING_SEEDS)),
        "judging": f"{JUDGING_SEEDS[0]} to {JUDGING_SEEDS[-1]}",
    }
    blocks = [HEADER.format(resamples=RESAMPLES, methods=len({row["method"] for row in rows}), **seeds)]
    blocks += ["## At the common learning rate", "![Where every run ended](stability.png)"]
    common, own = ([row for row in rows if row["tuned"] == tuned] for tuned in (False, True))
    for title in dict.fromkeys(REGIMES[row["regime"]].world.title for row in rows):
        of_world = [row for row in common if REGIMES[row["regime"]].world.title == title]
        blocks += [f"### {title}", table(of_world, cell)]
    blocks += [TUNED, table(own, tuned_cell)] if own else []
    blocks += ["## Regimes", "\n".join(f"- **{each.title}**: {_regime_text(each)}" for each in REGIMES.values())]
    blocks += ["## Methods", "\n".join(f"- **{each.title}**: {each.description}." for each in METHODS.values())]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _regime_text(regime: Any) -> str:
    return (
        f"{regime.description}; {regime.world.description}. {regime.rollouts} rollouts of {regime.trajectories} "
        f"trajectories, learning rate {regime.learning_rate:g}."
    )


def write_report(records: Iterable[Record], earlier: Sequence[Row], folder: Path) -> None:
    """Write `stability.json`, `stability.md` and `stability.png` into `folder`."""
    rows = make_rows(records, earlier)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(rows, folder / "stability.json")
    (folder / "stability.md").write_text(report(rows))
    draw([row for row in rows if not row["tuned"] and METHODS[row["method"]].drawn], folder / "stability.png")


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """JSON, a line per row."""
    lines = ",\n".join(json.dumps(row, allow_nan=False, separators=(",", ":")) for row in rows)
    path.write_text(f"[\n{lines}\n]\n")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, none where it is not there."""
    return list(json.loads(path.read_text())) if path.is_file() else []


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that needs no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.tick_params(labelsize=8, length=2)
    axis.set_axisbelow(True)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Final sampled EM of every run at the common learning rate: a panel per regime, a line per method."""
    regimes = [name for name in REGIMES if any(row["regime"] == name for row in rows)]
    methods = [name for name in METHODS if any(row["method"] == name for row in rows)]
    figure = new_figure(2.6 + 2.1 * len(regimes), 1.2 + 0.3 * len(methods))
    axes = figure.subplots(1, len(regimes), squeeze=False, sharex=True, sharey=True)[0]
    for axis, regime in zip(axes, regimes, strict=True):
        for row in (row for row in rows if row["regime"] == regime):
            _draw_ends(axis, methods.index(row["method"]), row)
        axis.set_title(REGIMES[regime].title, fontsize=10)
        tidy(axis)
    axes[0].set_yticks(range(len(methods)), [METHODS[name].title for name in methods], fontsize=9)
    axes[0].invert_yaxis()
    axes[0].set_xlim(left=-0.02)
    figure.suptitle("Where training ended: sampled EM on an unseen world, common learning rate", fontsize=12)
    figure.supxlabel("final sampled EM (dot: a run that held, cross: one that collapsed, bar: mean)", fontsize=9)
    figure.savefig(path, dpi=80)


def _draw_ends(axis: Axes, height: int, row: Row) -> None:
    """A mark per run, seeds one under the other so that equal ends stay apart."""
    colour = BASELINE if row["method"] == row["baseline"] else COLOURS[height % len(COLOURS)]
    offsets = np.linspace(-0.2, 0.2, len(row["seeds"]))
    for seed, end, offset in zip(row["seeds"], row["sampled_em_by_seed"], offsets, strict=True):
        marker, size = ("x", 24) if seed in row["collapsed_seeds"] else ("o", 14)
        axis.scatter(end, height + offset, marker=marker, s=size, color=colour, linewidths=1.3)
    mean = row["sampled_em"]
    axis.plot([mean, mean], [height - 0.36, height + 0.36], color=colour, linewidth=2.6, solid_capstyle="butt")
