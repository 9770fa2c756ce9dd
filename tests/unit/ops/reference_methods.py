"""Slow references for what `sorl_trl.ops` has of other methods: loops over Python numbers, sharing no code."""

from __future__ import annotations

import math

from torch import Tensor

from .reference import positions_of_turns


def effective_sample_size(weights: list[float]) -> float:
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))


def good_trajectories(advantages: Tensor, turn_ids: Tensor) -> list[bool]:
    rows = [[float(advantages[i, t]) for turn in turns for t in turn]
            for i, turns in enumerate(positions_of_turns(turn_ids))]  # fmt: skip
    return [math.fsum(row) / max(len(row), 1) >= 0 for row in rows]


def llds(log_ratio: Tensor, turn_ids: Tensor, good: list[bool]) -> tuple[float, dict[tuple[int, int], float]]:
    """The loss, and its derivative by each log-ratio where that is not 0."""
    tokens, total, slopes = 0, [], {}
    for i, turns in enumerate(positions_of_turns(turn_ids)):
        if not good[i]:
            continue
        tokens += sum(map(len, turns))
        for turn in turns:
            falls = {t: -float(log_ratio[i, t]) for t in turn}
            if math.fsum(falls.values()) > 0:
                total += [fall for fall in falls.values() if fall > 0]
                slopes |= {(i, t): -1.0 for t, fall in falls.items() if fall > 0}
    count = max(tokens, 1)
    return math.fsum(total) / count, {at: slope / count for at, slope in slopes.items()}


def minirl(ratio: float, mismatch: float, advantage: float, ranges: tuple[float, float], cap: float) -> float:
    """The weight M · min(w, C) · Â of a token's ∇log π."""
    low, high = ranges
    if (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low):
        return 0.0
    return min(ratio * mismatch, cap) * advantage


def turn_mismatch(log_ratio: Tensor, turn_ids: Tensor) -> dict[tuple[int, int], float]:
    """Trajectory and turn -> its g."""
    return {
        (i, k): math.exp(math.fsum(float(log_ratio[i, t]) for t in turn) / len(turn))
        for i, turns in enumerate(positions_of_turns(turn_ids))
        for k, turn in enumerate(turns)
    }


def is_vetoed(log_ratio: Tensor, turn_ids: Tensor, least: float) -> list[bool]:
    return [
        any(math.exp(float(log_ratio[i, t])) < least for turn in turns for t in turn)
        for i, turns in enumerate(positions_of_turns(turn_ids))
    ]
