"""Does the turn beat the token and the sequence as turns grow longer? Rows, table and figure from the runs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.seed_statistics import paired
from benchmarks.stability_figures import new_figure, tidy
from benchmarks.stability_methods import METHODS
from benchmarks.stability_statistics import Record, Run, mean_final
from benchmarks.turn_length_grid import SEEDS_PER_POLICY, SETTINGS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
CONTRASTS = {"turn-token": "token", "turn-sequence": "sequence"}
"""Name of a contrast to the level whose final EM is taken from that of turns."""
COLOURS = {"turn-token": "#0072B2", "turn-sequence": "#D55E00"}
STYLES = dict(zip(SETTINGS, ("-", "--", ":"), strict=True))
X_AXES = {"turn_tokens": "tokens per turn", "turns": "turns per trajectory"}
HEADER = """# Does the turn beat the token and the sequence as turns grow longer?

Written by `python -m benchmarks.turn_length` from {runs} runs of one thread, {seconds:,.0f} CPU seconds: the same
questions, passages and decisions, written in turns of other lengths, and questions of other numbers of hops. A
difference is the final sampled EM with turn ratios less that with the other ratios, paired by seed, with a 95 %
percentile bootstrap interval over seeds; p is that of the exact sign-flip test, for no more than one comparison. The
learning rate is the same for all methods. Seeds {shared} start from one policy each and differ in questions and
random numbers: neither interval nor p, which take seeds for independent, says how other policies would do.
The clip range is 0.2 either way for tokens, divided by the square root of its tokens for a turn and by their number
for a sequence, as chosen on other seeds (`stability_trials.md`: with 0.2, turns of 40 tokens collapse). Tokens and
turns are those of the first rollout, before training has changed them (`rollout/tokens_per_turn`,
`rollout/turns_per_trajectory`)."""


ENDS = """Means over the seeds: sampled EM of the policy that the runs start from, final EM, and how many of them end
below their start or below half of their best."""


def length_rows(records: Iterable[Record], settings: dict[str, dict[str, str]]) -> list[Row]:
    """Compare turns with tokens and with sequences in every regime.

    Args:
        records: of judging runs at one learning rate per regime, in the order in which the rows shall be.
        settings: setting ("ratios alone") to level ("token", "turn", "sequence") to the name of a method.

    Returns:
        A row per regime, setting and contrast of which some seed has both runs: `turn_tokens` and `turns` (means of
        the first rollout over the runs of the row), `contrast`, `setting`, `difference` of final sampled EM, its
        `interval` (`None` for one seed) and `p`, `seeds`, `regime` and `policy_parameters`.
    """
    cells: dict[str, dict[str, list[Run]]] = {}
    for record in records:
        cells.setdefault(record["regime"], {}).setdefault(record["method"], []).append(Run(record))
    rows: list[Row] = []
    for regime, by_method in cells.items():
        for setting, methods in settings.items():
            for contrast, level in CONTRASTS.items():
                turns, others = by_method.get(methods["turn"], []), by_method.get(methods[level], [])
                if found := paired(turns, others):
                    both = [run for run in (*turns, *others) if run.seed in found["seeds"]]
                    rows.append({**_shape(both), "contrast": contrast, "setting": setting, **_fields(found)})
                    rows[-1]["regime"] = regime
    return rows


def _shape(runs: Sequence[Run]) -> Row:
    """Tokens and turns as they were before training, and the size of the policy."""
    firsts = {key: [run.metric(key)[0] for run in runs if run.metric(key)] for key in _SHAPE.values()}
    shape: Row = {name: statistics.fmean(firsts[key]) if firsts[key] else None for name, key in _SHAPE.items()}
    return {**shape, "policy_parameters": runs[0].record["policy_parameters"]}


_SHAPE = {"turn_tokens": "rollout/tokens_per_turn", "turns": "rollout/turns_per_trajectory"}


def _fields(found: Row) -> Row:
    return {"difference": found["mean"], **{name: found[name] for name in ("interval", "p", "seeds")}}


def table(rows: Sequence[Row]) -> str:
    """Markdown, a line per row."""
    names = ["tokens a turn", "turns", "setting", "contrast", "difference", "p", "seeds"]
    body = [
        [
            *(_short(row[name]) for name in X_AXES),
            *(row["setting"], row["contrast"], _difference(row), f"{row['p']:.3g}", str(len(row["seeds"]))),
        ]
        for row in rows
    ]
    lines = [names, ["---:", "---:", "---", "---", "---:", "---:", "---:"], *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def ends_table(records: Iterable[Record]) -> str:
    """Markdown, a line per regime and method: what `ENDS` says."""
    cells: dict[tuple[str, str], list[Run]] = {}
    for record in records:
        cells.setdefault((record["regime"], record["method"]), []).append(Run(record))
    lines = [
        "| world | method | start | sampled EM | greedy EM | collapsed |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for (regime, method), runs in cells.items():
        start = statistics.fmean(run.start or 0.0 for run in runs)
        ends = (f"{mean_final(runs, score):.3f}" for score in ("sampled_em", "greedy_em"))
        collapsed = f"{sum(run.collapsed for run in runs)} of {len(runs)}"
        lines.append(f"| {' | '.join([regime, METHODS[method].title, f'{start:.3f}', *ends, collapsed])} |")
    return "\n".join(lines) + "\n"


def _difference(row: Row) -> str:
    interval = "" if row["interval"] is None else " [{:+.3f}, {:+.3f}]".format(*row["interval"])
    return f"{row['difference']:+.3f}{interval}"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def write_turn_length(
    records: Sequence[Record], rows: Sequence[Row], folder: Path, panels: dict[str, set[str]]
) -> None:
    """Write `turn_length.json`, `turn_length.md` and `turn_length.png` into `folder`.

    Args:
        records: of all runs, for their number and cost.
        rows: as `length_rows` returns them.
        folder: made where missing.
        panels: "turn_tokens" and "turns" to the regimes in which that alone varies.

    Raises:
        ImportError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "turn_length.json").write_text(json.dumps(list(rows), indent=2, allow_nan=False) + "\n")
    seconds = sum(record["seconds"] for record in records)
    header = HEADER.format(runs=len(records), seconds=seconds, shared=_sharing(record["seed"] for record in records))
    picture = "![Differences against tokens per turn, and against turns](turn_length.png)"
    ends = ["## Where they end", ENDS, ends_table(records)]
    (folder / "turn_length.md").write_text("\n\n".join([header, picture, table(rows), *ends]))
    draw(rows, panels, folder / "turn_length.png")


def _sharing(seeds: Iterable[int]) -> str:
    """The seeds of each policy: "201 to 204, 205 to 208"."""
    groups: dict[int, list[int]] = {}
    for seed in sorted(set(seeds)):
        groups.setdefault((seed - 1) // SEEDS_PER_POLICY, []).append(seed)
    return ", ".join(f"{group[0]} to {group[-1]}" for group in groups.values())


def draw(rows: Sequence[Row], panels: dict[str, set[str]], path: Path) -> None:
    """The differences with their intervals: a panel per thing that varies, a line per contrast and setting."""
    figure = new_figure(11, 4.4)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (key, regimes) in zip(axes, panels.items(), strict=True):
        _draw_panel(axis, key, [row for row in rows if row["regime"] in regimes and row[key] is not None])
    axes[0].set_ylabel("difference of final sampled EM", fontsize=9)
    axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle("Turn ratios against token and sequence ratios: mean over seeds, 95 % intervals", fontsize=12)
    figure.savefig(path, dpi=90)


def _draw_panel(axis: Axes, key: str, rows: Sequence[Row]) -> None:
    tidy(axis)
    axis.axhline(0, color="0.45", linewidth=1)
    axis.set_xlabel(X_AXES[key], fontsize=9)
    places = [row[key] for row in rows]
    if key == "turn_tokens":
        axis.set_xscale("log")
        rounded = sorted({round(place) for place in places})
        axis.set_xticks(rounded, labels=[str(place) for place in rounded])
        axis.set_xticks([], minor=True)
    elif places:
        axis.set_xticks(range(math.floor(min(places)), math.ceil(max(places)) + 1))
    lines = [(contrast, setting) for contrast in CONTRASTS for setting in STYLES]
    for place, (contrast, setting) in enumerate(lines):
        found = sorted((r for r in rows if (r["contrast"], r["setting"]) == (contrast, setting)), key=lambda r: r[key])
        # A little apart, so that intervals at the same place can be told apart.
        x = np.array([row[key] for row in found]) * (1 + 0.015 * (place - 1.5))
        y = np.array([row["difference"] for row in found])
        intervals = np.array([row["interval"] or (row["difference"],) * 2 for row in found]).reshape(-1, 2)
        axis.errorbar(
            x,
            y,
            yerr=np.abs(intervals.T - y),
            label=f"{contrast.replace('-', ' less ')}, {setting}",
            color=COLOURS[contrast],
            linestyle=STYLES[setting],
            marker="o",
            markersize=4,
            capsize=2,
        )
