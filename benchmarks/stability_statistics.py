"""What the stability benchmark concludes from its runs, and no opinion on which method is ours.

A record is what the runner keeps of one run, a row what `stability.json` keeps of the seeds of one regime, method and
learning rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

LAST = 5
"""Rollouts at the end whose evaluations make the final EM."""
MARGIN = 0.1
"""A learning rate whose final EM on the first choosing seed is further below the best is out of the question."""
INFINITE = 1e308
"""JSON has no infinity: records and rows write this number."""
RESAMPLES = 10_000
MOST_PAIRS = 20
"""The sign-flip test goes through all 2^n signs."""

Record = Mapping[str, Any]
Row = dict[str, Any]


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

    @cached_property
    def collapsed(self) -> bool:
        """Died, or the final sampled EM is below the start's or below half of the best evaluation's."""
        return bool(self.record["error"]) or self.final("sampled_em") < max(self.start, self.best / 2)

    def metric(self, key: str) -> list[float]:
        """A training metric, rollout by rollout, without the rollouts that have none."""
        figures = [rollout.get(key) for rollout in self.record["rollouts"]]
        return [float(figure) for figure in figures if figure is not None and not math.isnan(figure)]


def rounded(learning_rate: float) -> float:
    """Three digits: 0.3 × 5e-4 and 1.5e-4 are the same learning rate, whatever their last bits say."""
    return float(f"{learning_rate:.3g}")


def bootstrap_interval(values: Sequence[float]) -> list[float] | None:
    """95 % percentile interval of the mean, from 10,000 resamples of `values` (n,) with a fixed seed.

    Returns:
        [low, high], or `None` for fewer than two values: one seed says nothing about the spread.
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

    Raises:
        ValueError: `differences` has no entry or more than 20.
    """
    pairs = len(differences)
    if not 1 <= pairs <= MOST_PAIRS:
        raise ValueError(f"`differences` has {pairs} entries; 1 to {MOST_PAIRS} are allowed.")
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


def choosing_plan(
    runs: Iterable[Run], regime: str, method: str, rates: Sequence[float], seeds: Sequence[int]
) -> list[tuple[float, int]]:
    """Learning rate and seed of the choosing runs that a method needs, as far as `runs` tell.

    On the first seed every learning rate is tried; on the others, those that came within `MARGIN` of the best there,
    unless that is a single one.
    """
    first, *others = seeds
    plan = [(rate, first) for rate in sorted(map(rounded, rates))]
    finals = {run.cell[2]: run.final("sampled_em") for run in _of(runs, regime, method) if run.seed == first}
    if not plan or any(rate not in finals for rate, _ in plan):
        return plan
    close = [rate for rate, _ in plan if finals[rate] >= max(finals[rate] for rate, _ in plan) - MARGIN]
    return plan + [(rate, seed) for rate in close for seed in others if len(close) > 1]


def chosen_rate(
    runs: Sequence[Run], regime: str, method: str, rates: Sequence[float], seeds: Sequence[int]
) -> float | None:
    """The learning rate with the highest mean final sampled EM over the choosing seeds, of equals the lowest.

    `None` while choosing runs are missing. A rate that only the first seed was asked about is out of the question.
    """
    plan = choosing_plan(runs, regime, method, rates, seeds)
    finals = {(run.cell[2], run.seed): run.final("sampled_em") for run in _of(runs, regime, method)}
    if not plan or any(asked not in finals for asked in plan):
        return None
    by_rate: dict[float, list[float]] = {}
    for rate, seed in plan:
        by_rate.setdefault(rate, []).append(finals[rate, seed])
    # Nine digits: means that differ in their last bits are equal.
    score = {rate: (len(found), round(statistics.fmean(found), 9)) for rate, found in by_rate.items()}
    return max(score, key=lambda rate: (*score[rate], -rate))


def _of(runs: Iterable[Run], regime: str, method: str) -> list[Run]:
    return [run for run in runs if run.cell[:2] == (regime, method)]
