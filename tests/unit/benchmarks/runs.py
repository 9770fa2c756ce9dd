"""A small plan of the stability benchmark, and records of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.stability_statistics import Grid

WORLD = SimpleNamespace(title="Flat", description="questions without hills", name="flat")
HIGH = SimpleNamespace(title="High", description="questions with hills", name="high")
REGIMES = {
    "calm": SimpleNamespace(title="Calm", description="few updates", epochs=2, methods=(), world=WORLD),
    "wild": SimpleNamespace(title="Wild", description="many updates", epochs=8, methods=(), world=HIGH),
}
_SHOWN = {"tuned": True, "drawn": True}
METHODS = {
    "grpo": SimpleNamespace(title="GRPO", family="grpo", description="token ratios", settings={}, **_SHOWN),
    "so_grpo": SimpleNamespace(
        title="SO-GRPO", family="grpo", description="turn ratios", settings={"ctn_coef": 3.0}, **_SHOWN
    ),
    "ppo": SimpleNamespace(title="PPO", family="ppo", description="with a critic", settings={}, **_SHOWN),
}
GRID = Grid(
    regimes=REGIMES,
    methods=METHODS,
    common_learning_rate={"calm": 1e-3, "wild": 5e-4},
    choices={"calm": (3e-4, 1e-3), "wild": (1.5e-4, 5e-4)},
    choosing_seeds=(1, 2),
    judging_seeds=(11, 12, 13),
)


def a_record(
    method: str = "grpo", seed: int = 11, em: float = 0.5, regime: str = "calm", rate: float = 1e-3
) -> dict[str, Any]:
    """A run of two rollouts that starts from a sampled EM of 0.3 and ends at `em`; its greedy EM is 0.1 more."""
    return {
        "regime": regime,
        "method": method,
        "learning_rate": rate,
        "seed": seed,
        "world": REGIMES[regime].world.name if regime in REGIMES else "flat",
        "policy_parameters": 1000,
        "harness": 3,
        "seconds": 10.0,
        "evaluations": evaluations(0.3, em, em),
        "rollouts": [{"reward": em, "clip_fraction/token": 0.1, "kl_to_old": 0.02, "kl_to_old max": 0.5}] * 2,
        "error": None,
    }


def evaluations(*sampled: float, every: int = 1) -> list[dict[str, float]]:
    """After rollouts 0, `every`, 2 `every`, …"""
    return [
        {"rollout": place * every, "sampled_em": em, "greedy_em": round(em + 0.1, 3)}
        for place, em in enumerate(sampled)
    ]


def records(method: str, ems: Sequence[float], regime: str = "calm", rate: float = 1e-3) -> list[dict[str, Any]]:
    """One run per judging seed, from the first on."""
    seeds = GRID.judging_seeds[: len(ems)]
    return [a_record(method, seed, em, regime, rate) for seed, em in zip(seeds, ems, strict=True)]


def choosing(method: str, ems: dict[float, tuple[float, float]], regime: str = "calm") -> list[dict[str, Any]]:
    """Choosing runs: learning rate to the final EM of either seed."""
    return [
        a_record(method, seed, em, regime, rate)
        for rate, of_rate in ems.items()
        for seed, em in zip(GRID.choosing_seeds, of_rate, strict=True)
    ]
