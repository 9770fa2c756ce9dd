"""What decides which part of SO-GRPO helps: arms that differ in one thing, or in learning rates alone.

All arms run in this package's trainer, whose losses of GRPO and GSPO are TRL's. A *yoked* arm has no target KL: its
learning rate is, update for update, the one that the target KL of `so_grpo` gave in the same world with the same seed.
SO-GRPO differs from GRPO in four things: ratios, range, mean and penalty. Four yoked arms differ from it in one each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.stability_plan import (
    ALL_REGIMES,
    METHODS,
    NO_PIECES,
    SEQUENCE,
    SYMMETRIC,
    TARGET,
    UNSET,
    BenchmarkMethod,
    Regime,
)
from benchmarks.worlds.mixture import WORLDS

YOKE = "so_grpo"
"""Whose learning rates the yoked arms follow."""
_DEFAULT = METHODS[YOKE]
_GSPO = UNSET | SYMMETRIC | SEQUENCE
_CONSTANT = {
    "plain": replace(METHODS["plain"], title="GRPO", description="token ratios"),
    "gspo_plain": BenchmarkMethod("GSPO", "so_grpo", "sequence ratios", _GSPO, NO_PIECES),
    "so_grpo_constant": replace(_DEFAULT, title="SO-GRPO, `target_kl=0`", settings={"target_kl": 0.0}),
}


def _yoked(change: str, **settings: Any) -> BenchmarkMethod:
    """SO-GRPO with one change, at the learning rates that SO-GRPO had without it."""
    constant = _CONSTANT["so_grpo_constant"]
    return replace(constant, title=f"SO-GRPO, {change}, yoked", settings=constant.settings | settings, follows=YOKE)


ARMS: dict[str, BenchmarkMethod] = {
    **_CONSTANT,
    "grpo_target": replace(METHODS["grpo_target"], title="GRPO + target KL"),
    "gspo_target": replace(_CONSTANT["gspo_plain"], title="GSPO + target KL", settings=_GSPO | TARGET),
    "so_grpo": replace(_DEFAULT, title="SO-GRPO"),
    "so_grpo_no_penalty": replace(_DEFAULT, title="SO-GRPO without penalty", method=NO_PIECES),
    "sequence": replace(METHODS["sequence"], title="`sequence`"),
    "yoked_grpo": replace(_CONSTANT["plain"], title="GRPO, yoked", follows=YOKE),
    "yoked_gspo": replace(_CONSTANT["gspo_plain"], title="GSPO, yoked", follows=YOKE),
    "yoked_tokens": _yoked("token ratios", importance_sampling_level="token"),
    "yoked_range": _yoked("range 0.2", epsilon=0.2),
    "yoked_mean": _yoked("mean over tokens", loss_type="grpo"),
    "yoked_no_penalty": replace(_yoked("no penalty"), method=NO_PIECES),
    "yoked_so_grpo": replace(_CONSTANT["so_grpo_constant"], title="SO-GRPO, yoked", follows=YOKE),
}
"""Constant learning rates, those that follow the KL, and those that follow the default's."""
CHECK = "yoked_so_grpo"
"""Repeats the default's run, number for number, unless yoking goes wrong: one seed shows it."""
HEADLINE = ("reuse", "long", "hot", "stale", "hunt-reuse")
LONG_TURNS = ("turns-of-40-in-3-hops", "turns-of-80-in-3-hops")
NOISY = {"noise": "Router noise", "bfloat16": "bfloat16 sampler"}
NOISE_REGIMES = {
    f"sampler-{kind}": Regime(
        title,
        "16 updates per rollout, whose ratios compare with the engine's log-probabilities",
        3e-4,
        world=WORLDS[kind],
        epochs=4,
        rollouts=12,
        methods=(),
        against_sampler=True,
    )
    for kind, title in NOISY.items()
}
COLUMNS = {name: ALL_REGIMES[name] for name in (*HEADLINE, *LONG_TURNS)} | NOISE_REGIMES
EVERY_REGIME = ALL_REGIMES | NOISE_REGIMES
EVERY_METHOD = METHODS | ARMS
FRESH_SEEDS = (301, 302, 303, 304, 305)
"""Had no part in any choice between arms."""
PARTS = ("yoked_tokens", "yoked_range", "yoked_mean", "yoked_no_penalty")
"""Asked of the headline alone."""
IN_LONG_TURNS = ("plain", "so_grpo_constant", "grpo_target", "so_grpo", "sequence", "yoked_grpo", "yoked_gspo", CHECK)
"""The arms that are run in long turns, where a run takes several times as long."""


def seeds_of(column: str) -> tuple[int, ...]:
    """Of long turns one more, because four of them start from one policy."""
    return (*FRESH_SEEDS, 306) if column in LONG_TURNS else FRESH_SEEDS


def arms_of(column: str) -> tuple[str, ...]:
    if column in LONG_TURNS:
        return IN_LONG_TURNS
    return tuple(arm for arm in ARMS if arm not in PARTS or column in HEADLINE)


SEARCHED = ("plain", "gspo_plain", "so_grpo_constant", "grpo_target", "so_grpo")
GRID = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
FIRST_RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
"""Where an end of what has run is best, the next rate of the grid follows, up or down."""
