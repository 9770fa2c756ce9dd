"""Slow references for `sorl_trl.ops`: loops over Python numbers, written from the equations, sharing no code."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Row = list[float]


def positions_of_turns(turn_ids: Tensor) -> list[list[list[int]]]:
    """For each trajectory, for each of its turns, the positions of its tokens."""
    return [
        [[t for t, id in enumerate(row) if id == k] for k in range(max([*row, -1]) + 1)] for row in turn_ids.tolist()
    ]


def mean(numbers: Row) -> float:
    return math.fsum(numbers) / len(numbers) if numbers else 0.0


def std(numbers: Row) -> float:
    """Unbiased; 0 of fewer than two."""
    return math.sqrt(math.fsum((x - mean(numbers)) ** 2 for x in numbers) / max(len(numbers) - 1, 1))


def kept(row: Row, mask_row: Row) -> Row:
    return [x for x, keep in zip(row, mask_row, strict=True) if keep]


def turn_reduce(x: Tensor, turn_ids: Tensor, reduce: Callable[[Row], float]) -> Tensor:
    turns = positions_of_turns(turn_ids)
    result = torch.zeros(len(turns), max([len(t) for t in turns], default=0), dtype=torch.float64)
    for i, row in enumerate(turns):
        for k, positions in enumerate(row):
            result[i, k] = reduce([float(x[i, t]) for t in positions])
    return result


def importance_ratio(log_ratio: Tensor, turn_ids: Tensor, level: str, turn_ratio: str) -> Tensor:
    result = torch.ones(turn_ids.shape, dtype=torch.float64)
    for i, turns in enumerate(positions_of_turns(turn_ids)):
        tokens = [t for turn in turns for t in turn]
        units = {"turn": turns, "sequence": [tokens], "token": [[t] for t in tokens]}[level]
        for unit in units:
            logs = [float(log_ratio[i, t]) for t in unit]
            arithmetic = level == "turn" and turn_ratio == "arithmetic"
            result[i, unit] = mean([math.exp(log) for log in logs]) if arithmetic else math.exp(mean(logs))
    return result


def scaled_clip_range(epsilon: float, turn_ids: Tensor) -> Tensor:
    result = torch.full(turn_ids.shape, epsilon, dtype=torch.float64)
    for i, turns in enumerate(positions_of_turns(turn_ids)):
        for turn in turns:
            result[i, turn] = epsilon / math.sqrt(len(turn) * math.sqrt(len(turn)))
    return result


def aggregate_turns(x: Tensor, turn_ids: Tensor) -> float:
    return mean(
        [mean([mean([float(x[i, t]) for t in k]) for k in ks]) for i, ks in enumerate(positions_of_turns(turn_ids))]
    )


def kl(log_ratio: float, estimator: str) -> float:
    w = math.exp(log_ratio)
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": 1 / w - 1 + log_ratio, "unbiased": w * math.log(w) - w + 1}[
        estimator
    ]


def clip_penalty(row: Row, mask_row: Row, epsilon_low: float, epsilon_high: float) -> float:
    logs = kept(row, mask_row)
    outside = [float(math.exp(log) < 1 - epsilon_low or math.exp(log) > 1 + epsilon_high) for log in logs]
    return mean(outside) * mean([kl(log, "unbiased") for log in logs])


def gae(rewards: Row, values: Row, mask_row: Row, gamma: float, lam: float) -> tuple[Row, Row]:
    """By the definition Â_t = Σ_l (γλ)^l δ_{t+l}, over the kept positions alone."""
    r, v = kept(rewards, mask_row), [*kept(values, mask_row), 0.0]
    deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
    sums = [math.fsum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, len(r))) for t in range(len(r))]
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    for t, position in enumerate(i for i, keep in enumerate(mask_row) if keep):
        advantages[position], returns[position] = sums[t], sums[t] + v[t]
    return advantages, returns


def explained_variance(values: Row, returns: Row) -> float:
    def variance(row: Row) -> float:
        return mean([(x - mean(row)) ** 2 for x in row])

    if len(returns) < 2:
        return math.nan
    return 1 - variance([r - v for r, v in zip(returns, values, strict=True)]) / variance(returns)


def group_turn_advantages(returns: list[Row], masks: list[Row], scale: bool) -> list[Row]:
    """Of one group."""
    turns = [kept(row, mask) for row, mask in zip(returns, masks, strict=True)]
    present = [row for row in turns if row]
    beyond = [[r - turn_baseline(present, k) for k, r in enumerate(row)] for row in turns]
    spread = math.fsum(mean([b**2 for b in row]) for row in beyond)
    divisor = math.sqrt(spread / max(len(present) - 1, 1)) + 1e-4 if scale else 1.0
    widths = map(len, returns)
    return [[b / divisor for b in row] + [0.0] * (width - len(row)) for row, width in zip(beyond, widths, strict=True)]


def turn_baseline(returns: list[Row], k: int) -> float:
    """Of turn k: what the trajectories earn, and how that changes up to turn k for those that have it."""
    return mean([row[0] for row in returns]) + mean([row[k] - row[0] for row in returns if len(row) > k])


def matched_advantages(returns: list[Row], labels: list[list[int]], masks: list[Row], scale: bool) -> list[Row]:
    """Of one group."""
    turns = [(i, k) for i, mask in enumerate(masks) for k, keep in enumerate(mask) if keep]
    found = [[0.0] * len(mask) for mask in masks]
    for i, k in turns:
        own = [returns[row][turn] for row, turn in turns if labels[row][turn] == labels[i][k]]
        if std(own) > 1e-6 or not scale:
            found[i][k] = (returns[i][k] - mean(own)) / (std(own) + 1e-4 if scale else 1.0)
    return found


def leave_one_out(returns: list[Row], num_generations: int) -> list[Row]:
    """With the baseline of the others; each row has as many returns as the trajectory has turns."""
    found: list[Row] = []
    for i, row in enumerate(returns):
        first = i - i % num_generations
        others = [returns[j] for j in range(first, first + num_generations) if j != i and returns[j]]
        shared = max(map(len, others), default=0)
        beyond = [r - turn_baseline(others, k) for k, r in enumerate(row[:shared])]
        alone = [row[0] - turn_baseline(others, 0) if others else 0.0 for _ in row[shared:]]
        found.append(beyond + alone)
    return found
