"""Our own switches at work: each changes the loss of a rollout whose policy has moved, or its gradient.

`tests/contract/test_switches_are_tested.py` names these tests, and those of the switches that act elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.effects import TRAINERS, build_trainer, effect

PENALTY = {"clip_normalization": "kl_penalty"}
TURNS = {"importance_sampling_level": "turn"}
OF_BOTH: dict[str, tuple[Any, dict[str, Any]]] = {
    "loss_type": ("turn", {}),
    "importance_sampling_level": ("turn", {}),
    "turn_ratio": ("arithmetic", TURNS),
    "clip_range_scaling": ("none", {}),
    "clip_normalization": ("kl_penalty", {}),
    "ctn_coef": (1.0, PENALTY),
    "kl_estimator": ("k1", PENALTY),
    "ctn_gate": ("turn", PENALTY),
    "ctn_epsilon": (0.3, PENALTY),
    "ctn_epsilon_high": (0.5, {"ctn_epsilon": 0.01, **PENALTY}),
    "gamma": (0.5, {}),
    "turn_boundary": ("tags", {"turn_boundary_tags": ["w5"], **TURNS}),
    "turn_boundary_tags": (["w5"], {"turn_boundary": "tags", **TURNS}),
}
"""Switch -> a value, and other settings under which it counts."""
OF_THE_CRITIC: dict[str, tuple[Any, dict[str, Any]]] = {
    "advantage_level": ("token", {}),
    "gae_lambda": (0.5, {}),
    "whiten_advantages": (False, {}),
    "kl_in_reward": (True, {"beta": 0.1}),
    "critic_trunk_gradient": (True, {}),
    "vf_coef": (2.0, {}),
    "value_clip_range": (0.001, {}),
}
"""The same for those of `SOPPOConfig`."""
ESTIMATORS = ["unbiased", "k1", "k2", "k3"]


def differ(folder: Path, tokenizer: Any, trainer: str, value: dict[str, Any], others: dict[str, Any]) -> bool:
    without = effect(build_trainer(folder / "without", tokenizer, trainer, **others))
    return without != effect(build_trainer(folder / "with", tokenizer, trainer, **{**others, **value}))


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("switch", OF_BOTH)
def test_switches_of_both_trainers(tmp_path: Path, tokenizer: Any, switch: str, trainer: str) -> None:
    value, others = OF_BOTH[switch]
    assert differ(tmp_path, tokenizer, trainer, {switch: value}, others)


@pytest.mark.parametrize("switch", OF_THE_CRITIC)
def test_switches_of_the_critic(tmp_path: Path, tokenizer: Any, switch: str) -> None:
    value, others = OF_THE_CRITIC[switch]
    assert differ(tmp_path, tokenizer, "SO-PPO", {switch: value}, others)


def test_no_two_estimators_are_alike(tmp_path: Path, tokenizer: Any) -> None:
    effects = [
        effect(build_trainer(tmp_path / name, tokenizer, "SO-GRPO", kl_estimator=name, ctn_gate="none", **PENALTY))
        for name in ESTIMATORS
    ]
    assert len({str(each) for each in effects}) == len(ESTIMATORS)
