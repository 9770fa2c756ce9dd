"""The configurations: plain defaults, values that are refused by name, and options that do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_trl import SOGRPOConfig, SOPPOConfig
from sorl_trl.experimental import GroupRefillConfig, SeeUPOConfig

SAPO = {"loss_type": "sapo", "importance_sampling_level": "token"}
MEAN = {"turn_ratio": "arithmetic"}
LATE = {"async_staleness": 1, "async_old_policy": "proximal"}
AHEAD = {"async_staleness": 1, "use_vllm": True, "vllm_mode": "server"}
AS_IS = {"importance_sampling_level": "turn"}
TOLD = {"generation_kwargs": {"temperature": 0.7, "seed": 5}}
SUMS, EACH = ({"multi_objective_aggregation": each} for each in ("sum_then_normalize", "normalize_then_sum"))


def build(tmp_path: Path, config_class: Any = SOGRPOConfig, **given: Any) -> Any:
    return config_class(str(tmp_path), use_cpu=True, bf16=False, **given)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("importance_sampling_level", "word", "'turn'"),
        ("loss_type", "minirl", "'turn'"),
        ("bias_norm", "false", "one of True, False"),
        ("target_kl", -0.1, "at least 0"),
        ("gamma", 1.5, "[0, 1]"),
        ("async_staleness", 1.5, "a whole number"),
        ("epsilon", "0.1", "at least 0"),
        ("epsilon", float("nan"), "at least 0"),
        ("temperature", 0, "above 0"),
        ("top_p", 1.1, "[0, 1]"),
        ("learning_rate", "1e-6", "at least 0"),
        ("num_generations", 0, "at least 1"),  # TRL divides by it
    ],
)
def test_bad_values_are_named(tmp_path: Path, name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        build(tmp_path, **{name: value})
    assert all(each in str(error.value) for each in (f"`{name}` is {value!r}", allowed))


@pytest.mark.parametrize(
    ("config_class", "given", "named", "instead"),
    [
        (SOGRPOConfig, {**SAPO, "clip_range_scaling": "length"}, "clip_range_scaling", {"clip_range_scaling": "none"}),
        (SOGRPOConfig, {**SAPO, "bias_norm": True}, "bias_norm", {"bias_norm": False}),
        (SOGRPOConfig, {"clip_range_scaling": "length", **MEAN}, "turn_ratio", {"clip_range_scaling": "sqrt_length"}),
        (SOPPOConfig, {"kl_in_reward": True}, "beta", {"beta": 0.1}),
        (SOPPOConfig, {"critic_trunk_gradient": True, "critic": "model"}, "critic_trunk_gradient", {"critic": "head"}),
        (SOPPOConfig, {"critic_trunk_gradient": True, "bias_norm": True}, "bias_norm", {"bias_norm": False}),
        (SOPPOConfig, EACH, "multi_objective_aggregation", SUMS),
        (SOPPOConfig, {"per_device_train_batch_size": 1}, "per_device_train_batch_size", {"steps_per_generation": 2}),
        (GroupRefillConfig, {"scale_rewards": "batch"}, "scale_rewards", {"scale_rewards": "none"}),
        (SOGRPOConfig, {**AHEAD, "top_p": 0.8}, "top_p", {"top_p": 1.0}),
        (SOPPOConfig, {**AHEAD, "top_k": 5}, "top_k", {"top_k": -1}),
        (SOGRPOConfig, {**AHEAD, "repetition_penalty": 1.1}, "repetition_penalty", LATE),
        (SOGRPOConfig, {**AHEAD, **TOLD, "temperature": 0.5}, "temperature", {"temperature": 0.7}),
        (SOGRPOConfig, {**AHEAD, "vllm_structured_outputs_regex": "a+"}, "structured_outputs", {"async_staleness": 0}),
        (SeeUPOConfig, {"scale_rewards": "group"}, "scale_rewards", {"scale_rewards": "batch"}),
        (SeeUPOConfig, {"importance_sampling_level": "sequence"}, "importance_sampling_level", AS_IS),
        (SeeUPOConfig, EACH, "multi_objective_aggregation", SUMS),
        (SeeUPOConfig, {"gamma": 0.9}, "gamma", {"gamma": 1.0}),
        (SeeUPOConfig, {"save_trajectories_steps": 5}, "save_trajectories_steps", {"save_trajectories_steps": 0}),
        (SeeUPOConfig, {"loss_type": "bnpo"}, "loss_type", {"loss_type": "grpo"}),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, config_class: Any, given: dict[str, Any], named: str, instead: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"`{named}"):
        build(tmp_path, config_class, **given)
    build(tmp_path, config_class, **{**given, **instead})
