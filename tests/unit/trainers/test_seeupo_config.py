"""What `SeeUPOConfig` refuses, and what it says is without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_trl import SeeUPOConfig, SOGRPOConfig
from sorl_trl.trainers.checks.inert import inert_warning, is_on_policy, suggested_setting
from sorl_trl.trainers.options.backward_rules import _ONLY, turn_limit_problems

REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "importance_sampling_level": ("sequence", {}),
    "rollout_staleness": (1, {}),
    "scale_rewards": ("group", {}),
    "group_baseline": ("leave_one_out", {}),
    "gamma": (0.9, {}),
    "turn_reward_normalization": ("separate", {}),
    "step_advantage_coef": (1.0, {}),
    "multi_objective_aggregation": ("normalize_then_sum", {}),
    "group_refill": (1, {"group_filter": "zero_variance"}),
    "llds_coef": (0.2, {}),
    "save_trajectories_steps": (5, {}),
    "turn_boundary": ("tags", {}),
}
"""Option -> a value that has no meaning here, and what must be set besides."""


def config(folder: Path, **fields: Any) -> SeeUPOConfig:
    given = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "num_iterations": 3}
    return SeeUPOConfig(**{**given, "steps_per_generation": 4, **fields})


def test_every_option_is_tried() -> None:
    assert set(REFUSED) == set(_ONLY)


@pytest.mark.parametrize("option", REFUSED)
def test_what_has_no_meaning_is_refused(tmp_path: Path, option: str) -> None:
    """`importance_sampling_level`, `scale_rewards` and the others: the value, what it must be, and why."""
    value, beside = REFUSED[option]
    only, why = _ONLY[option]
    problems = [p for p in _unchecked(tmp_path, **beside, **{option: value}).problems() if p.option == option]
    assert f"`{option}` is {value!r}, but must be {only!r}: {why}." in [problem.what for problem in problems]
    assert only in [problem.proposal for problem in problems]
    with pytest.raises(ValueError, match=f"`{option}`"):
        config(tmp_path, **beside, **{option: value})


def _unchecked(folder: Path, **fields: Any) -> SeeUPOConfig:
    made = config(folder)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_mean_over_micro_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`loss_type` is 'bnpo'"):
        config(tmp_path, loss_type="bnpo")


def test_turns_that_leave_a_trajectory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`vllm_importance_sampling_mode` is 'turn_mask', but SeeUPO"):
        config(tmp_path, use_vllm=True, vllm_importance_sampling_mode="turn_mask")
    config(tmp_path, use_vllm=True, vllm_importance_sampling_mode="turn_truncate")


@pytest.mark.parametrize(
    "batches",
    [
        {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
        {
            **{"steps_per_generation": None, "generation_batch_size": 24},
            **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
        },
    ],
    ids=["given", "derived"],
)
def test_an_update_has_one_turn(tmp_path: Path, batches: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`steps_per_generation` is 3, but must be a multiple of"):
        config(tmp_path, **batches)
    config(tmp_path, steps_per_generation=4, gradient_accumulation_steps=2)


def test_an_iteration_for_each_turn() -> None:
    assert not [*turn_limit_problems(3, 3, "here")]
    [problem] = turn_limit_problems(2, 3, "here")
    assert problem.option == "num_iterations" and problem.proposal == 3
    assert "`num_iterations` is 2, but must be 3, the most turns that a trajectory can have (here)" in problem.what


class TestOneUpdatePerTurn:
    """Each turn is compared with the policy right before it, so that several iterations make no ratio."""

    def test_it_is_said(self, tmp_path: Path) -> None:
        alone = config(tmp_path, steps_per_generation=2, gradient_accumulation_steps=2)
        assert is_on_policy(alone)
        warning = inert_warning(alone)
        assert warning is not None
        assert "one in each iteration" in warning and "`steps_per_generation=8`" in warning
        assert suggested_setting(alone) == ("steps_per_generation", 8)

    def test_minibatches_make_ratios(self, tmp_path: Path) -> None:
        assert inert_warning(config(tmp_path)) is None

    def test_others_compare_with_the_policy_of_the_rollout(self, tmp_path: Path) -> None:
        fields = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "num_iterations": 3}
        again = SOGRPOConfig(**fields, steps_per_generation=2, gradient_accumulation_steps=2)
        assert inert_warning(again) is None
        once = SOGRPOConfig(**{**fields, "num_iterations": 1}, importance_sampling_level="turn")
        assert suggested_setting(once) == ("num_iterations", 4)
