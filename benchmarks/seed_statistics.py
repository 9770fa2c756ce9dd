"""Intervals and tests over seeds, of runs that are paired by seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.stability_statistics import Run

RESAMPLES = 10_000
MOST_PAIRS = 20
"""The sign-flip test goes through all 2^n signs."""


def bootstrap_interval(values: Sequence[float], statistic: Callable[..., Any] = np.mean) -> list[float] | None:
    """95 % percentile interval of a statistic, from 10,000 resamples of `values` (n,) with a fixed seed.

    Args:
        values: of independent runs.
        statistic: `np.mean`, or another reduction of numpy.

    Returns:
        [low, high], or `None` for fewer than two values: one seed says nothing about the spread.
    """
    if len(values) < 2:
        return None
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(statistic(np.asarray(values, dtype=float)[draws], axis=1), [2.5, 97.5])
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


def paired(runs: Sequence[Run], baseline: Sequence[Run]) -> dict[str, Any] | None:
    """Final sampled EM minus the baseline's, over the seeds that both have in one harness; `None` if there is none.

    Evaluations of two harnesses differ in what they draw, which is common to all runs of either.
    """
    other = {(run.harness, run.seed): run.final("sampled_em") for run in baseline}
    of_both = [run for run in runs if (run.harness, run.seed) in other]
    differences = {run.seed: run.final("sampled_em") - other[run.harness, run.seed] for run in of_both}
    if not differences:
        return None
    values = list(differences.values())
    return {
        "seeds": list(differences),
        "mean": statistics.fmean(values),
        "interval": bootstrap_interval(values),
        "p": sign_flip_test(values),
    }
