"""The stability benchmark's report: `stability.json` and `stability.md`.

Rows are made from the records of runs. Those of what has not been run again stay as `stability.json` has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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

KEY = ("regime", "method", "learning_rate", "tuned")
"""What makes a row."""
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

**Made before the code changed**, and not again since: Turn-PPO, ST-PPO and "SO-PPO, narrow, token GAE", when a turn's
ratio still averaged the advantages of its tokens; GiGPO, "sequence, GiGPO's turns" and "sequence, γ = .95", when turns
were compared with one mean per group, whatever their index. All rows with a critic: its head read hidden states as
they are, at the learning rate of the value model, and one norm clipped both gradients.

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
    blocks += ["## At the common learning rate"]
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
    """Write `stability.json` and `stability.md` into `folder`."""
    rows = make_rows(records, earlier)
    folder.mkdir(parents=True, exist_ok=True)
    write_compact_rows(rows, folder / "stability.json")
    (folder / "stability.md").write_text(report(rows))


def write_compact_rows(rows: Sequence[Row], path: Path) -> None:
    """JSON, a line per row."""
    lines = ",\n".join(json.dumps(row, allow_nan=False, separators=(",", ":")) for row in rows)
    path.write_text(f"[\n{lines}\n]\n")
