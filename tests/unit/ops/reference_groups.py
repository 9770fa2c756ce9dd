"""Slow references for what `sorl_trl.ops` does with groups: loops over Python numbers, from the equations."""

from __future__ import annotations

import math

Row = list[float]


def leave_one_out(returns: list[Row], num_generations: int) -> list[Row]:
    """Â_{i,k} = R_{i,k} − mean_{j ≠ i} mean_k R_{j,k}; each row has as many returns as the trajectory has turns."""
    found: list[Row] = []
    for i, row in enumerate(returns):
        first = i - i % num_generations
        others = [returns[j] for j in range(first, first + num_generations) if j != i and returns[j]]
        means = [math.fsum(other) / len(other) for other in others]
        found.append([r - math.fsum(means) / len(means) if means else 0.0 for r in row])
    return found


def spread(rewards: Row) -> float:
    """Of one group; NaN is no reward."""
    scored = [r for r in rewards if not math.isnan(r)]
    if len(scored) < 2:
        return 0.0
    mean = math.fsum(scored) / len(scored)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in scored) / (len(scored) - 1))


def top_k(spreads: Row, count: int) -> list[bool]:
    ranked = sorted(range(len(spreads)), key=lambda i: (-spreads[i], i))[:count]
    return [i in ranked and spreads[i] > 1e-6 for i in range(len(spreads))]


def top_p(spreads: Row, share: float) -> list[bool]:
    variances = [s**2 if s > 1e-6 else 0.0 for s in spreads]
    kept: set[int] = set()
    for i in sorted(range(len(spreads)), key=lambda i: (-spreads[i], i)):
        if kept and math.fsum(variances[j] for j in kept) >= share * math.fsum(variances) * (1 - 1e-9):
            break
        kept.add(i)
    return [i in kept and variances[i] > 0 for i in range(len(spreads))]
