"""The log entries of a run in which nothing is wrong."""

from __future__ import annotations

from typing import Any


def numbered(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**entry, "step": step} for step, entry in enumerate(entries, 1)]


def healthy(iteration: int) -> dict[str, float | None]:
    """Learns, and varies a little."""
    noise = 0.05 * (iteration % 3)
    return {
        "reward": 0.3 + 0.005 * iteration - noise,
        "trajectories_without_turn": noise,
        "kl_to_old": 0.02 + noise / 2,
        "turns/ratio_max": 2.0 + noise,
        "rollout/searches_per_trajectory": 1.5 + noise,
    }
