"""When a rollout is used for one update, and what then has no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_trl import SOGRPOConfig, SOPPOConfig
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.checks.inert import inert_settings, inert_warning, is_on_policy, updates_per_rollout

SWITCHED_OFF = {"importance_sampling_level": "token", "clip_normalization": "none", "target_kl": 0.0}


def config(tmp_path: Path, config_class: type[TurnLevelConfig] = SOGRPOConfig, **overrides: Any) -> TurnLevelConfig:
    return config_class(output_dir=str(tmp_path), use_cpu=True, bf16=False, **overrides)


@pytest.mark.parametrize("config_class", [SOGRPOConfig, SOPPOConfig])
def test_trls_batch_defaults_are_on_policy(tmp_path: Path, config_class: type[TurnLevelConfig]) -> None:
    defaults = config(tmp_path, config_class)
    assert updates_per_rollout(defaults) == 1
    assert inert_settings(defaults) == [
        "clip_range_scaling='length'",
        "target_kl=0.005",
    ]
    accumulating = config(tmp_path, config_class, gradient_accumulation_steps=4)
    assert (updates_per_rollout(accumulating), is_on_policy(accumulating)) == (1, True)


@pytest.mark.parametrize(
    ("overrides", "updates", "on_policy"),
    [
        ({"num_iterations": 2}, 2, False),
        ({"steps_per_generation": 4}, 4, False),
        ({"generation_batch_size": 32}, 4, False),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, 0.5, True),
        # The second update has one micro-batch from before the first.
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, 2 / 3, False),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, 1.5, False),
        ({"rollout_staleness": 1}, 1, False),
        ({"use_vllm": True}, 1, True),
    ],
)
def test_updates_per_rollout(tmp_path: Path, overrides: dict[str, Any], updates: float, on_policy: bool) -> None:
    chosen = config(tmp_path, **overrides)
    assert updates_per_rollout(chosen) == pytest.approx(updates)
    assert is_on_policy(chosen) == on_policy
    assert (inert_warning(chosen) is not None) == on_policy


def test_the_warning_names_what_to_set(tmp_path: Path) -> None:
    warning = inert_warning(config(tmp_path, gradient_accumulation_steps=4))
    assert warning is not None
    factors = "`num_iterations` 1 x `steps_per_generation` 4 / `gradient_accumulation_steps` 4"
    assert warning.startswith(f"Updates per rollout: 1 ({factors}).")
    assert "`steps_per_generation=16`" in warning
    assert "`num_iterations=4`" in warning
    assert updates_per_rollout(config(tmp_path, gradient_accumulation_steps=4, steps_per_generation=16)) == 4
    assert updates_per_rollout(config(tmp_path, gradient_accumulation_steps=4, num_iterations=4)) == 4


def test_what_is_switched_off_is_not_missed(tmp_path: Path) -> None:
    assert inert_warning(config(tmp_path, **SWITCHED_OFF)) is None
    assert inert_warning(config(tmp_path, **{**SWITCHED_OFF, "importance_sampling_level": "sequence"})) is None
    assert inert_settings(config(tmp_path, **{**SWITCHED_OFF, "target_kl": 0.1})) == ["target_kl=0.1"]
    scaled = {**SWITCHED_OFF, "importance_sampling_level": "sequence", "clip_range_scaling": "length"}
    assert inert_settings(config(tmp_path, **scaled)) == ["clip_range_scaling='length'"]
    penalty = {**SWITCHED_OFF, "clip_normalization": "kl_penalty", "ctn_coef": 0.0}
    assert inert_settings(config(tmp_path, **penalty)) == []
    bias = {**SWITCHED_OFF, "clip_normalization": "bias_norm"}
    assert inert_settings(config(tmp_path, **bias)) == ["clip_normalization='bias_norm'"]
    double_sided = {**SWITCHED_OFF, "double_sided_clip": True}
    assert inert_settings(config(tmp_path, **double_sided)) == ["double_sided_clip=True"]
    guard = {**SWITCHED_OFF, "llds_coef": 0.2}
    assert inert_settings(config(tmp_path, **guard)) == ["llds_coef=0.2"]
