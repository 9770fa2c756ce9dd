"""SOPPOConfig: what it refuses, and that one trajectory per prompt changes nothing else of TRL's config."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig

from sorl_trl import SOPPOConfig


def build(tmp_path: Path, **overrides: Any) -> SOPPOConfig:
    return SOPPOConfig(str(tmp_path), use_cpu=True, bf16=False, **overrides)


def test_defaults(tmp_path: Path) -> None:
    config = build(tmp_path)
    assert (config.ratio_level, config.loss_type) == ("sequence", "grpo")
    assert (config.clip_normalization, config.clip_range_scaling_in_use) == ("none", "length")
    assert (config.advantage_level, config.num_generations) == ("turn", 1)
    assert (config.gamma, config.gae_lambda, config.whiten_advantages) == (1.0, 1.0, True)
    assert (config.vf_coef, config.value_clip_range, config.critic_warmup_steps) == (0.5, 0.2, 0)
    assert (config.critic, config.critic_trunk_gradient, config.kl_in_reward) == (None, False, False)
    assert config.ddp_find_unused_parameters is False


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("gamma", 1.01, "[0, 1]"),
        ("gamma", -0.1, "[0, 1]"),
        ("gae_lambda", 1.01, "[0, 1]"),
        ("gae_lambda", -0.1, "[0, 1]"),
        ("gae_lambda", float("nan"), "[0, 1]"),
        ("critic", "value", "'adapter', 'head', 'model'"),
        ("advantage_level", "sequence", "'turn', 'token'"),
        ("vf_coef", -0.5, "at least 0"),
        ("vf_coef", float("inf"), "finite"),
        ("critic_learning_rate", -1e-5, "at least 0"),
        ("critic_warmup_steps", -1, "at least 0"),
        ("value_clip_range", 0.0, "above 0, or None"),
        ("value_clip_range", -0.2, "above 0, or None"),
        ("value_clip_range", float("nan"), "above 0, or None"),
        ("multi_objective_aggregation", "normalize_then_sum", "'sum_then_normalize'"),
        ("loss_type", "ppo", "'turn'"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        build(tmp_path, **{name: value})
    assert f"`{name}`" in str(error.value)
    assert str(value) in str(error.value)
    assert allowed in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("gamma", 0.0), ("gae_lambda", 0.0), ("vf_coef", 0.0), ("critic_learning_rate", 0.0), ("value_clip_range", None)],
)
def test_limits_are_allowed(tmp_path: Path, name: str, value: Any) -> None:
    assert getattr(build(tmp_path, **{name: value}), name) == value


def test_kl_in_reward_needs_beta(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`kl_in_reward` is set, but `beta`.* is 0\.0"):
        build(tmp_path, kl_in_reward=True)
    assert build(tmp_path, kl_in_reward=True, beta=0.1).kl_in_reward


@pytest.mark.parametrize("critic", ["adapter", "model"])
def test_only_a_head_reaches_the_trunk(tmp_path: Path, critic: str) -> None:
    with pytest.raises(ValueError, match=rf"`critic_trunk_gradient` is set, but `critic='{critic}'`"):
        build(tmp_path, critic=critic, critic_trunk_gradient=True)
    assert build(tmp_path, critic="head", critic_trunk_gradient=True).critic_trunk_gradient


def test_scaling_by_a_group_has_no_effect(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"`scale_rewards='group'` has no effect"):
        build(tmp_path, scale_rewards="group")


def test_the_critic_learns_ten_times_as_fast(tmp_path: Path) -> None:
    assert build(tmp_path, learning_rate=3e-5).critic_learning_rate == pytest.approx(3e-4)
    assert build(tmp_path, learning_rate=3e-5, critic_learning_rate=1e-5).critic_learning_rate == 1e-5


def test_a_users_choice_of_parameter_search_stays(tmp_path: Path) -> None:
    assert build(tmp_path, ddp_find_unused_parameters=True).ddp_find_unused_parameters is True


BATCHES: dict[str, dict[str, Any]] = {
    "even": {"per_device_train_batch_size": 8},
    "odd": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5},
    "prime": {"per_device_train_batch_size": 7},
    "generation_batch_size": {"per_device_train_batch_size": 3, "generation_batch_size": 9},
    "steps_per_generation": {"per_device_train_batch_size": 1, "steps_per_generation": 3},
    "evaluation": {"per_device_train_batch_size": 6, "eval_strategy": "steps", "eval_steps": 1},
}


@pytest.mark.parametrize("batch", BATCHES)
def test_one_trajectory_per_prompt_changes_no_derived_field(tmp_path: Path, batch: str) -> None:
    """TRL refuses `num_generations=1`; everything else is what it makes of the same batch."""
    ours = build(tmp_path, **BATCHES[batch], num_generations=1)
    size = ours.generation_batch_size
    theirs = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, **BATCHES[batch], num_generations=size, num_generations_eval=1
    )
    assert ours.num_generations == 1
    assert ours.num_generations_eval == 1
    own = {"epsilon", "epsilon_high", "num_generations", "loss_type", "importance_sampling_level"}
    own |= {"scale_rewards", "ddp_find_unused_parameters", "disable_dropout"}
    for field in fields(GRPOConfig):
        if field.name not in own:
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name


def test_a_group_is_trls(tmp_path: Path) -> None:
    config = build(tmp_path, per_device_train_batch_size=8, num_generations=4)
    assert (config.num_generations, config.num_generations_eval) == (4, None)
    with pytest.raises(ValueError, match=r"divisible by num_generations \(3\)"):
        build(tmp_path, per_device_train_batch_size=8, num_generations=3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"generation_batch_size": 9}, "divisible by the global batch size"),
        ({"generation_batch_size": 8, "steps_per_generation": 2}, "can not be both configured"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"eval_strategy": "steps", "num_generations_eval": 3}, "generations used for evaluation"),
    ],
    ids=["generation_batch_size", "both", "auto_find_batch_size", "evaluation"],
)
def test_trls_own_checks_still_run(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(tmp_path, per_device_train_batch_size=4, **overrides)


def test_one_trajectory_is_no_rollout(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`per_device_train_batch_size` is 1"):
        build(tmp_path, per_device_train_batch_size=1)
    assert build(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2).generation_batch_size == 2
    assert build(tmp_path, per_device_train_batch_size=1, generation_batch_size=2).steps_per_generation == 2


@pytest.mark.parametrize(
    ("name", "value", "off"),
    [("turn_reward_normalization", "separate", "'together'"), ("step_advantage_coef", 1.0, "0.0")],
)
def test_what_compares_the_turns_of_a_group_is_refused(tmp_path: Path, name: str, value: Any, off: str) -> None:
    with pytest.raises(ValueError, match=f"^`{name}` is {value!r}, .* critic. Set `{name}={off}`, or use SO-GRPO"):
        build(tmp_path, num_generations=4, **{name: value})
