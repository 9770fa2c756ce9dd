"""The rules whose thresholds `benchmarks.guard_rules` fits: in the guard's own shape, and in others to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.guard_fit import Template
from sorl_trl.diagnostics import DEFAULT_RULES, Level, Rule

RULES = {rule.name: rule for rule in DEFAULT_RULES}
FITTED = {
    "high_kl": "threshold",
    "high_clip_fraction": "threshold",
    "high_turn_ratio": "threshold",
    "reward_fall": "share",
    "entropy_growth": "factor",
    "invalid_actions": "minimum",
}
"""Rule to the field that is its threshold. Of `invalid_actions` that is the minimum: the count begins near 0, so that
any factor is soon reached."""
BY_HAND = {
    "high_kl": 0.2,
    "high_clip_fraction": 0.25,
    "high_turn_ratio": 4.0,
    "reward_fall": 0.65,
    "entropy_growth": 1.3,
    "invalid_actions": 0.3,
}
"""The thresholds that were chosen with all figures in view, judging seeds included."""
_MANTISSAS = (10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30, 33, 36, 39, 43, 47, 51, 56, 62, 68, 75, 82, 91)


def levels(low: float, high: float) -> list[float]:
    """Numbers of two digits from `low` to `high`, ascending; each is about a tenth more than the one before it."""
    numbers = [float(f"{mantissa}e{power}") for power in range(-5, 3) for mantissa in _MANTISSAS]
    return [number for number in numbers if low <= number <= high]


THRESHOLDS: dict[str, Sequence[float]] = {
    "high_kl": levels(1e-3, 100),
    "high_clip_fraction": levels(0.01, 0.91),
    "high_turn_ratio": levels(1.1, 910),
    "reward_fall": [share / 100 for share in range(95, 4, -1)],
    "entropy_growth": [tenths / 10 for tenths in range(11, 60)],
    "invalid_actions": levels(0.01, 9.1),
}
"""From the one that fires most to the one that fires least."""
_PATIENCES = ({"patience": 1}, {"patience": 2}, {"patience": 3})
_GROWTHS = tuple({"baseline": baseline, **patience} for baseline in (2, 3, 5) for patience in _PATIENCES)
SHAPES: dict[str, Sequence[dict[str, int]]] = {
    "high_kl": _PATIENCES,
    "high_clip_fraction": _PATIENCES,
    "high_turn_ratio": _PATIENCES,
    "reward_fall": ({"window": 1}, {"window": 2}, {"window": 3}, {"window": 4}),
    "entropy_growth": _GROWTHS,
    "invalid_actions": _PATIENCES,
}
"""What may differ besides the threshold."""


def own_shape(name: str) -> dict[str, int]:
    """That of `DEFAULT_RULES`."""
    return {field: getattr(RULES[name], field) for field in SHAPES[name][0]}


def template(name: str, shape: dict[str, int]) -> Template:
    """The guard's rule in another shape, without its threshold."""
    fields: dict[str, Any] = dict(shape)
    return Template(lambda threshold: replace(RULES[name], **fields, **{FITTED[name]: threshold}), THRESHOLDS[name])


def with_thresholds(thresholds: dict[str, float]) -> list[Rule]:
    """`DEFAULT_RULES` with other thresholds."""
    return [
        replace(rule, **{FITTED[rule.name]: thresholds[rule.name]}) if rule.name in thresholds else rule
        for rule in DEFAULT_RULES
    ]


def in_use() -> dict[str, float]:
    return {name: float(getattr(RULES[name], field)) for name, field in FITTED.items()}


def _level(metric: str, patience: int, side: str = "above") -> Template:
    def rule(threshold: float) -> Rule:
        return Level(metric, metric, "", threshold=threshold, side=side, patience=patience)

    ascending = levels(1e-4, 0.91)
    return Template(rule, ascending if side == "above" else ascending[::-1])


OTHERS = {
    f"`{metric}` {side}, {patience} in a row": _level(metric, patience, side)
    for metric, side in (
        ("clip_fraction/turn", "above"),
        ("turns/ratio_min", "below"),
        ("rollout/invalid_actions_per_trajectory", "above"),
    )
    for patience in (2, 3)
}
"""Rules that the guard has not."""
