"""The share of the returns' variance that states explain, from several continuations of each state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]

RESAMPLES = 2000


@dataclass(frozen=True)
class Ceiling:
    """1 − E[Var(R | s)] / Var(R), over the states of all turns and by turn; NaN where all returns are equal."""

    overall: float
    interval: tuple[float, float]
    by_turn: list[float]
    intervals: list[tuple[float, float]]
    states: list[int]
    """Visits of each turn index, by which the turns are weighed."""


@dataclass(frozen=True)
class StateReturns:
    """Returns of M continuations from each of the states of every turn index.

    Args:
        returns: of each turn index, (N_k, M).
        visits: how many states of each turn index there are in the trajectories that the states were drawn from.
    """

    returns: list[Floats]
    visits: list[int]

    def estimate(self) -> Ceiling:
        """The ceiling with 95 % intervals: states are drawn with replacement within each turn index."""
        generator = np.random.default_rng(0)
        found = [_moments(r, np.arange(len(r))) for r in self.returns]
        drawn = [_moments(r, generator.integers(len(r), size=(RESAMPLES, len(r)))) for r in self.returns]
        return Ceiling(
            float(self._pooled(found)),
            _interval(self._pooled(drawn)),
            [float(_share(*moments)) for moments in found],
            [_interval(_share(*moments)) for moments in drawn],
            self.visits,
        )

    def _pooled(self, moments: list[tuple[Floats, Floats, Floats]]) -> Floats:
        """Over the states of all turns, each turn index with the weight of its visits."""
        weights = np.array(self.visits) / sum(self.visits)
        within = sum(w * m[0] for w, m in zip(weights, moments, strict=True))
        mean = sum(w * m[2] for w, m in zip(weights, moments, strict=True))
        between = sum(w * (m[1] + np.square(m[2] - mean)) for w, m in zip(weights, moments, strict=True))
        return _share(np.asarray(within), np.asarray(between), np.asarray(mean))


def _moments(returns: Floats, rows: npt.NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
    """E[Var(R | s)], Var(E[R | s]) and E[R] of the states in `rows` (..., N), the first two without bias."""
    means, variances = returns.mean(1)[rows], returns.var(1, ddof=1)[rows]
    within = variances.mean(-1)
    # The means of M returns vary more than the expectations do, by what is within, over M.
    between = means.var(-1, ddof=1) - within / returns.shape[1]
    return within, between, means.mean(-1)


def _share(within: Floats, between: Floats, mean: Floats) -> Floats:
    total = within + between
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total > 0, between / total, np.nan)


def _interval(resampled: Floats) -> tuple[float, float]:
    if np.isnan(resampled).all():
        return float("nan"), float("nan")
    low, high = np.nanquantile(resampled, (0.025, 0.975))
    return float(low), float(high)
