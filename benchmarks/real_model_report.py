"""The table and the picture of `benchmarks.real_model`, from the rows that are there."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
BASELINE = "black"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00")
"""Okabe and Ito's: colour-blind people tell them apart."""
TITLES = {
    "gentle": "Gentle: 10 rollouts of 64, 8 updates each",
    "many_updates": "Many updates: 5 rollouts of 64, 24 updates each",
    "high_rate": "The same at three times the rate",
    "late": "Late: 10 rollouts of 64, 8 updates each, sampled up to four rollouts ahead",
    "ahead_0": "20 rollouts of 32, 4 updates each",
    "ahead_2": "The same, sampled up to two rollouts ahead",
    "ahead_8": "The same, sampled up to eight rollouts ahead",
}
HEADER = """# A pretrained language model learns to search

`python -m benchmarks.real_model`: SmolLM2-135M-Instruct, {parameters:,} parameters, and exact match on 200 questions
that nobody trained on: sampled before training, and sampled and greedy after it. Rows say by a digest from which warm
start they began, for where it is made anew it need not be the same. A cell of several seeds has their mean and each in
brackets. The columns of hops tell sampled answers apart by the searches that a question needs, with how many it got.
Runs on a GPU are in float32 too. Groups agree where all eight rewards are the same, so that nothing is learnt from
them. The learning rate is the mean factor by which the target KL multiplied it. A run has collapsed if it ends below
its start, or below half of its best three rollouts in a row. The clip fraction is its mean over updates, KL and
gradient are the largest of any run. The runs of `ppo` and `so_ppo` are older than the scaling of the critic's head and
than its own bound on the gradient."""
CHOOSING = """## Learning rates

On seed 1 with many updates, the final sampled exact match of each rate; the best one is what judges a method."""
COLUMNS = (
    *("runs", "rate", "before", "sampled", "one hop", "searches", "two hops", "searches", "greedy"),
    *("collapsed", "groups that agree", "learning rate", "clipped", "KL", "gradient", "CPU-minutes a run"),
)


def table(rows: Sequence[Row]) -> str:
    blocks = [HEADER.format(parameters=rows[0]["policy_parameters"])]
    for regime, title in TITLES.items():
        methods = _by_method([row for row in rows if row["regime"] == regime and row["judging"]])
        if methods:
            lines = [_line("", *COLUMNS), _line(*["---"] * (1 + len(COLUMNS)))]
            blocks += [f"## {title}", "\n".join([*lines, *(_cells(name, of) for name, of in methods.items())])]
    tried = _by_method([row for row in rows if not row["judging"]])
    if tried:
        rates = sorted({row["learning_rate"] for of in tried.values() for row in of})
        lines = [_line("", *(f"{rate:g}" for rate in rates)), _line(*["---"] * (1 + len(rates)))]
        for name, of in tried.items():
            ends = {row["learning_rate"]: f"{row['final_em']:.3f}{_fallen([row])}" for row in of}
            lines.append(_line(f"`{name}`", *(ends.get(rate, "–") for rate in rates)))
        blocks += [CHOOSING, "\n".join(lines)]
    return "\n\n".join(blocks) + "\n"


def _by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {name: [row for row in rows if row["method"] == name] for name in dict.fromkeys(r["method"] for r in rows)}


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _fallen(rows: Sequence[Row]) -> str:
    return ", collapsed" if any(row["collapsed"] for row in rows) else ""


def _several(each: Sequence[float]) -> str:
    """The mean, and each in brackets."""
    if not each:
        return "–"
    return f"{statistics.fmean(each):.3f}" + (f" ({', '.join(f'{one:.2f}' for one in each)})" if each[1:] else "")


def _cells(method: str, rows: Sequence[Row]) -> str:
    def ends(name: str) -> str:
        return _several([row[name] for row in rows])

    def of_hops(hops: str, name: str) -> str:
        return _several([row["by_hops"][hops][name] for row in rows if "by_hops" in row])

    def largest(name: str) -> float:
        return max(row[name] for row in rows)

    # Of a run that was ended by hand it is not known.
    known = [row["cpu_seconds"] for row in rows if row["cpu_seconds"] and row["device"] == "cpu"]
    devices = Counter(row["device"] for row in rows)
    return _line(
        f"`{method}`",
        ", ".join(f"{number} on {'a CPU' if device == 'cpu' else device}" for device, number in devices.items()),
        f"{rows[0]['learning_rate']:g}",
        f"{statistics.fmean(row['start_em'] for row in rows):.3f}",
        ends("final_em"),
        *(of_hops(hops, name) for hops in ("1", "2") for name in ("exact_match", "searches")),
        ends("final_greedy_em"),
        f"{sum(row['collapsed'] for row in rows)} of {len(rows)}",
        *(_several([row[name] for row in rows if name in row]) for name in ("agreeing_groups", "lr_factor")),
        f"{statistics.fmean(row['clip_fraction'] for row in rows):.1%}",
        f"{largest('kl_max'):.2f}",
        f"{largest('grad_norm_max'):.0f}",
        f"{statistics.fmean(known) / 60:.0f}" if known else "–",
    )


def tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.tick_params(labelsize=8, length=2)
    axis.set_axisbelow(True)


def draw(rows: Sequence[Row], path: Path) -> None:
    """The mean reward of each rollout, a panel per regime: of a method the mean over seeds, and its runs, pale."""
    from matplotlib.figure import Figure

    regimes = {name: [row for row in rows if row["regime"] == name and row["judging"]] for name in TITLES}
    regimes = {name: of for name, of in regimes.items() if of}
    methods = list(dict.fromkeys(row["method"] for of in regimes.values() for row in of))
    figure = Figure(figsize=(3.0 * len(regimes), 3.2), layout="constrained")
    axes = figure.subplots(1, len(regimes), squeeze=False, sharey=True)[0]
    for axis, (regime, of) in zip(axes, regimes.items(), strict=True):
        for name, runs in _by_method(of).items():
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
    figure.savefig(path)
