"""The configurations: plain defaults, values that are refused by name, and options that do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_trl import SOGRPOConfig, SOPPOConfig
from sorl_trl.checks import POSITIVE_COUNT
from sorl_trl.experimental import GroupRefillConfig, SeeUPOConfig
from sorl_trl.trainers.config import OF_TRL

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
        ("turn_ratio", "harmonic", "'geometric'"),
        ("loss_type", "minirl", "'turn'"),
        ("clip_range_scaling", "log", "'sqrt_length'"),
        ("bias_norm", "false", "one of True, False"),
        ("disable_dropout", 1, "one of True, False"),
        ("target_kl", -0.1, "at least 0"),
        ("target_kl", float("inf"), "finite"),
        ("target_kl", None, "at least 0"),
        ("gamma", 1.5, "[0, 1]"),
        ("gamma", True, "[0, 1]"),
        ("async_staleness", 1.5, "a whole number"),
        ("async_old_policy", "older", "'behaviour'"),
        ("save_trajectories_steps", -1, "at least 0"),
        ("epsilon", "0.1", "at least 0"),
        ("epsilon", float("nan"), "at least 0"),
        ("epsilon_high", -0.1, "at least 0"),
        ("temperature", 0, "above 0"),
        ("top_p", 1.1, "[0, 1]"),
        ("learning_rate", "1e-6", "at least 0"),
        ("beta", "1e-3", "at least 0"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        build(tmp_path, **{name: value})
    assert all(each in str(error.value) for each in (f"`{name}` is {value!r}", allowed))


@pytest.mark.parametrize("name", [name for name, allowed in OF_TRL.items() if allowed == POSITIVE_COUNT])
def test_counts_of_a_batch_are_refused_before_trl_divides_by_them(tmp_path: Path, name: str) -> None:
    for config_class, value in ((SOGRPOConfig, 0), (SOPPOConfig, 2.5)):
        with pytest.raises(ValueError, match=f"`{name}` is {value}, but must be a whole number, at least 1"):
            build(tmp_path, config_class, **{name: value})


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
        (SOGRPOConfig, {**AHEAD, "top_k": 5}, "top_k", {"top_k": -1}),
        (SOPPOConfig, {**AHEAD, "min_p": 0.1}, "min_p", {"min_p": 0.0}),
        (SOGRPOConfig, {**AHEAD, "repetition_penalty": 1.1}, "repetition_penalty", LATE),
        (SOGRPOConfig, {**AHEAD, **TOLD, "temperature": 0.5}, "temperature", {"temperature": 0.7}),
        (SOGRPOConfig, {**AHEAD, "generation_kwargs": {"bad_words": ["w"]}}, "bad_words", {"use_vllm": False}),
        (SOGRPOConfig, {**AHEAD, "vllm_structured_outputs_regex": "a+"}, "structured_outputs", {"async_staleness": 0}),
        (SeeUPOConfig, {"scale_rewards": "group"}, "scale_rewards", {"scale_rewards": "batch"}),
        (SeeUPOConfig, {"importance_sampling_level": "sequence"}, "importance_sampling_level", AS_IS),
        (SeeUPOConfig, EACH, "multi_objective_aggregation", SUMS),
        (SeeUPOConfig, {"gamma": 0.9}, "gamma", {"gamma": 1.0}),
        (SeeUPOConfig, {"save_trajectories_steps": 5}, "save_trajectories_steps", {"save_trajectories_steps": 0}),
        (SeeUPOConfig, {"loss_type": "bnpo"}, "loss_type", {"loss_type": "grpo"}),
        (SeeUPOConfig, {"loss_type": "sapo"}, "loss_type", {"loss_type": "grpo"}),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, config_class: Any, given: dict[str, Any], named: str, instead: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"`{named}"):
        build(tmp_path, config_class, **given)
    build(tmp_path, config_class, **{**given, **instead})
