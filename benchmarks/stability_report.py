"""The stability benchmark's report: `stability.json` and `stability.md`.

Rows are made from the records of runs. Those of what has not been run again stay as `stability.json` has them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, Row, table, write_rows
from benchmarks.stability_plan import JUDGING_SEEDS, METHODS, REGIMES

LAST = 5
"""Rollouts at the end whose evaluations make the final EM."""
INFINITE = 1e308
"""JSON has no infinity: records and rows write this number."""
RESAMPLES = 10_000

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One run and what became of it. A run that died (`error`) ends with an EM of 0 and has collapsed."""

    record: Record

    @property
    def cell(self) -> tuple[str, str, float]:
        """Regime, method, learning rate."""
        return self.record["regime"], self.record["method"], rounded(self.record["learning_rate"])

    @property
    def seed(self) -> int:
        return int(self.record["seed"])

    @property
    def start(self) -> float:
        """Sampled EM of the policy that the run started from."""
        return next((entry["sampled_em"] for entry in self.record["evaluations"] if entry["rollout"] == 0), 0.0)

    @property
    def best(self) -> float:
        """Sampled EM of the best single evaluation."""
        return max((entry["sampled_em"] for entry in self.record["evaluations"]), default=0.0)

    def final(self, score: str) -> float:
        """Mean of `score` ("sampled_em" or "greedy_em") over the evaluations after the last five rollouts."""
        if self.record["error"]:
            return 0.0
        evaluations = self.record["evaluations"]
        last = max(entry["rollout"] for entry in evaluations)
        return statistics.fmean(entry[score] for entry in evaluations if entry["rollout"] > max(0, last - LAST))

    @property
    def rates(self) -> tuple[float, float]:
        """The mean learning rate of its updates, and the mean of those on its last rollout."""
        taken = self.record["rates"]
        last = -(-len(taken) // len(self.record["rollouts"]))
        return statistics.fmean(taken), statistics.fmean(taken[-last:])

    @cached_property
    def collapsed(self) -> bool:
        """Died, or the final sampled EM is below the start's or below half of the best evaluation's."""
        return bool(self.record["error"]) or self.final("sampled_em") < max(self.start, self.best / 2)

    def metric(self, key: str) -> list[float]:
        """A training metric, rollout by rollout, without the rollouts that have none."""
        figures = [rollout.get(key) for rollout in self.record["rollouts"]]
        return [float(figure) for figure in figures if figure is not None and not math.isnan(figure)]


def rounded(learning_rate: float) -> float:
    """Three digits: 0.3 × 5e-4 and 1.5e-4 are the same learning rate, whatever their last bits."""
    return float(f"{learning_rate:.3g}")


def bootstrap_interval(values: Sequence[float]) -> list[float] | None:
    """95 % percentile interval of the mean, from 10,000 resamples of `values` (n,) with a fixed seed.

    Returns:
        [low, high], or `None` for fewer than two values: one seed shows no spread.
    """
    if len(values) < 2:
        return None
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.mean(np.asarray(values, dtype=float)[draws], axis=1), [2.5, 97.5])
    return [float(low), float(high)]


def sign_flip_test(differences: Sequence[float]) -> float:
    """Exact two-sided p of a mean difference of 0, for `differences` (n,) of paired runs.

    The share of all 2^n ways to flip signs whose mean is at least as far from 0 as the observed one; the smallest
    possible is 2 / 2^n.
    """
    pairs = len(differences)
    signs = 1 - 2 * (np.arange(2**pairs)[:, None] >> np.arange(pairs) & 1)
    sums = np.abs(signs @ np.asarray(differences, dtype=float))
    # Sums of the same numbers in another order differ in their last bits.
    return float(np.mean(sums >= sums[0] - 1e-9 * np.abs(differences).sum()))


def paired(row: Row, baseline: Row | None) -> Row | None:
    """Final sampled EM less the baseline's, over the seeds that both have; `None` if there is none.

    Nor is there one of two harnesses: their evaluations differ in what they draw, which is common to all runs of
    either.
    """
    if baseline is None or row["harnesses"] != baseline["harnesses"]:
        return None
    own, other = (dict(zip(each["seeds"], each["sampled_em_by_seed"], strict=True)) for each in (row, baseline))
    differences = {seed: own[seed] - other[seed] for seed in own if seed in other}
    if not differences:
        return None
    values = list(differences.values())
    return {
        "seeds": list(differences),
        "mean": statistics.fmean(values),
        "interval": bootstrap_interval(values),
        "p": sign_flip_test(values),
    }


def summarize(runs: Sequence[Run]) -> Row:
    """The figures of one cell; `None` for one that no run has."""

    def over(key: str, in_run: Callable[..., float], over_runs: Callable[..., float]) -> float | None:
        figures = [in_run(metric) for run in runs if (metric := run.metric(key))]
        return max(-INFINITE, min(over_runs(figures), INFINITE)) if figures else None

    sampled, greedy = ([run.final(score) for run in runs] for score in ("sampled_em", "greedy_em"))
    return {
        "seeds": [run.seed for run in runs],
        "harnesses": sorted({run.record["harness"] for run in runs}),
        "collapses": sum(run.collapsed for run in runs),
        "collapsed_seeds": [run.seed for run in runs if run.collapsed],
        "errors": {str(run.seed): run.record["error"] for run in runs if run.record["error"]},
        "sampled_em": statistics.fmean(sampled),
        "sampled_em_interval": bootstrap_interval(sampled),
        "sampled_em_by_seed": sampled,
        "greedy_em": statistics.fmean(greedy),
        "greedy_em_interval": bootstrap_interval(greedy),
        "greedy_em_by_seed": greedy,
        "best_sampled_em": statistics.fmean(run.best for run in runs),
        "rate_mean": statistics.fmean(run.rates[0] for run in runs),
        "rate_final": statistics.fmean(run.rates[1] for run in runs),
        "clip_fraction": over("clip_fraction/token", statistics.fmean, statistics.fmean),
        "kl_median": over("kl_to_old median", statistics.median, statistics.median),
        "kl_max": over("kl_to_old max", max, max),
        "grad_norm_max": over("grad_norm max", max, max),
        "ratio_min": over("turns/ratio_min", min, min),
        "ratio_max": over("turns/ratio_max", max, max),
        "explained_variance": over("critic/explained_variance", statistics.fmean, statistics.fmean),
        "world": runs[0].record["world"],
        "policy_parameters": runs[0].record["policy_parameters"],
    }


HEADER = """# Does it hold? Many short runs under stress

Written by `python -m benchmarks.stability`. Rows whose runs are not in `runs/stability/` are those of earlier runs.
`stability.json` has every row with its seeds, intervals, KL, gradient norms, ratios and differences to GRPO or PPO.

**All methods of a column are given its learning rate, but methods with a target KL lower it**, to a half down to a
twelfth in the mean. So this table does not tell a method from its learning rate:
[another one](equal_rates.md) makes rates equal, and searches for them. "At" is the mean rate of rows that recorded it.

**Final EM** of a run is the mean sampled exact match over the evaluations after its last five rollouts, on a world
that nobody trained on. Cells are means over seeds with 95 % percentile bootstrap intervals ({resamples:,} resamples;
over so few seeds too narrow rather than too wide), and how many runs collapsed.

**A run has collapsed** if its final EM is below that of the policy it started from, or below half of its own best
evaluation. A run that died, of weights that are not numbers, has collapsed with an EM of 0. This was fixed before any
run. The start was evaluated once, on 200 questions (standard error about .03).

**¹ and ²** mark rows of the first two versions of this benchmark, whose evaluations draw other random numbers: they
compare with each other, not with rows of the third. With {methods} methods, one comparison in twenty has an interval
without 0 by chance. **Made before the code changed**, and not again since: "SO-PPO, narrow, token GAE", and, but
for Reuse, Hot and Stale, Turn-PPO and ST-PPO, when a turn's ratio still averaged the advantages of its tokens; but for
Reuse and, with GiGPO, hunts of that kind, GiGPO, "sequence, GiGPO's turns" and "sequence, γ = .95", when turns were
compared with one mean per group, whatever their index. All other rows with a critic: its head read hidden states as
they are, at the learning rate of the value model, and one norm clipped both gradients. Runs of many
updates at a high rate end elsewhere on another processor, seed by seed.

**Seeds** 101 and 102 chose all settings, and enter no result. Seeds {judging} chose no setting of a method; but that
`sequence` is what held best was seen with their runs in view, so that for this they are no test."""


def make_rows(records: Iterable[Record], earlier: Sequence[Row]) -> list[Row]:
    """The rows of `records` and, where they lack one of its seeds, the `earlier` one; each with its differences."""
    made = {_key(row): row for row in earlier}
    cells: dict[tuple[str, str, float], list[Run]] = {}
    for run in sorted(map(Run, records), key=lambda run: run.seed):
        if run.seed in JUDGING_SEEDS and run.cell[2] == rounded(REGIMES[run.cell[0]].learning_rate):
            cells.setdefault(run.cell, []).append(run)
    for (regime, method, rate), of in cells.items():
        row = {"regime": regime, "method": method, "learning_rate": rate, **summarize(of)}
        if {*made.get(_key(row), row)["seeds"]} <= {*row["seeds"]}:  # else the earlier one has more
            made[_key(row)] = row
    return [_with_difference(row, made) for row in sorted(made.values(), key=_place)]


def _key(row: Row) -> tuple[str, str]:
    return row["regime"], row["method"]


def _place(row: Row) -> tuple[int, int]:
    return [*REGIMES].index(row["regime"]), [*METHODS].index(row["method"])


def _with_difference(row: Row, rows: Mapping[tuple[str, str], Row]) -> Row:
    baseline = METHODS[row["method"]].family
    difference = None if row["method"] == baseline else paired(row, rows.get((row["regime"], baseline)))
    return {**row, "baseline": baseline, "difference": difference}


def cell(row: Row) -> str:
    """Final EM with its interval, and how many runs collapsed."""
    interval = " [{:.2f}, {:.2f}]".format(*row["sampled_em_interval"]) if row["sampled_em_interval"] else ""
    marks = "".join("¹²"[harness - 1] for harness in row["harnesses"] if harness < 3)
    collapses = f", {row['collapses']} of {len(row['seeds'])}" if row["collapses"] else ""
    rate = row.get("rate_mean") or row["learning_rate"]
    lowered = f" at {rate:.1e}" if rate < 0.999 * row["learning_rate"] else ""
    return f"{row['sampled_em']:.2f}{interval}{marks}{collapses}{lowered}"


def regime_table(rows: Sequence[Row]) -> str:
    """Methods by regimes."""
    found = {(row["method"], row["regime"]): cell(row) for row in rows}
    regimes = [name for name in REGIMES if any(regime == name for _, regime in found)]
    lines = [
        [METHODS[method].title, *(found.get((method, regime), "–") for regime in regimes)]
        for method in METHODS
        if any(method == of for of, _ in found)
    ]
    return table(["method", *(REGIMES[name].title for name in regimes)], lines, left=1)


def report(rows: Sequence[Row]) -> str:
    """`stability.md`."""
    judging = f"{JUDGING_SEEDS[0]} to {JUDGING_SEEDS[-1]}"
    blocks = [HEADER.format(resamples=RESAMPLES, methods=len({row["method"] for row in rows}), judging=judging)]
    for title in dict.fromkeys(REGIMES[row["regime"]].world.title for row in rows):
        of_world = [row for row in rows if REGIMES[row["regime"]].world.title == title]
        blocks += [f"## {title}", regime_table(of_world)]
    blocks += ["## Regimes", "\n".join(f"- **{each.title}**: {_regime_text(each)}" for each in REGIMES.values())]
    blocks += ["## Methods", "\n".join(f"- **{each.title}**: {each.description}." for each in METHODS.values())]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _regime_text(regime: Any) -> str:
    return (
        f"{regime.description}; {regime.world.description}. {regime.rollouts} rollouts of {regime.trajectories} "
        f"trajectories, learning rate {regime.learning_rate:g}."
    )


def write_report(records: Iterable[Record], earlier: Sequence[Row]) -> None:
    """Write `stability.json` and `stability.md`."""
    rows = make_rows(records, earlier)
    write_rows(rows, RESULTS / "stability.json")
    (RESULTS / "stability.md").write_text(report(rows))
