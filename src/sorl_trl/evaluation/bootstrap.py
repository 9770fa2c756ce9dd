"""Means over questions, and how far they could be off: the percentile bootstrap.

Questions are drawn with replacement, as many as there are, and the mean is taken; the middle 95 % of many such means
are the interval. What is drawn depends on nothing but the number of questions and the name of the stream.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RESAMPLES = 10_000
"""Ours: the ends of an interval then vary by about a hundredth of its width."""


@dataclass(frozen=True)
class Estimate:
    """A mean, and the means of the resamples."""

    mean: float
    resampled: Floats
    """Shape (RESAMPLES,); NaN where a resample held nothing to take the mean of."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean."""
        low, high = np.nanquantile(self.resampled, (0.025, 0.975))
        return float(low), float(high)

    @property
    def p_value(self) -> float:
        """The two-sided p of a mean of zero: twice the share of resamples on the rarer side of it, at most 1."""
        known = self.resampled[~np.isnan(self.resampled)]
        rarer = min(int((known <= 0).sum()), int((known >= 0).sum()))
        # Plus one, for the data itself: a finite number of resamples proves no probability of zero.
        return min(1.0, 2 * (rarer + 1) / (len(known) + 1))


def bootstrap(columns: Mapping[str, Floats], stream: str) -> dict[str, Estimate]:
    """Estimate the mean of each column; all columns are resampled together.

    Args:
        columns: Name -> values, shape (questions,), NaN where a question has none. A column of nothing else has no
            estimate.
        stream: Names the random numbers: estimates of different streams are independent.
    """
    known = {name: column for name, column in columns.items() if not np.isnan(column).all()}
    if not known:
        return {}
    values = np.stack(list(known.values()), axis=1)
    resampled = _resampled_means(values, np.random.default_rng(random.Random(f"bootstrap/{stream}").getrandbits(64)))
    means = np.nanmean(values, axis=0)
    return {name: Estimate(float(means[i]), resampled[:, i]) for i, name in enumerate(known)}


def _resampled_means(values: Floats, rng: np.random.Generator) -> Floats:
    """Shape (RESAMPLES, M), of `values` of shape (Q, M)."""
    size = len(values)
    known, filled = ~np.isnan(values), np.nan_to_num(values)
    means = []
    with np.errstate(invalid="ignore"):  # 0 / 0 is the NaN that says so
        for _ in range(RESAMPLES):
            times = np.bincount(rng.integers(size, size=size), minlength=size).astype(np.float64)
            means.append((times @ filled) / (times @ known))
    return np.array(means)
