"""That an option of TRL's is honoured, seen from outside: docs/options.md names these tests beside each option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.effects import TRAINERS, build_trainer, effect
from tests.trajectories import length_reward, parity_reward

TWO_REWARDS = {"reward_funcs": [parity_reward, length_reward]}

LOSS_OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "beta": (0.1, {}),
    "use_bias_correction_kl": (False, {"beta": 0.1}),
    "epsilon": (0.01, {}),
    "epsilon_high": (0.01, {}),
    "delta": (1.02, {}),
    "loss_type": ("dapo", {}),
    "importance_sampling_level": ("token", {}),
    "sapo_temperature_neg": (2.0, {"loss_type": "sapo"}),
    "sapo_temperature_pos": (2.0, {"loss_type": "sapo"}),
    "vespo_k_pos": (1.0, {"loss_type": "vespo"}),
    "vespo_lambda_pos": (1.0, {"loss_type": "vespo"}),
    "vespo_k_neg": (1.0, {"loss_type": "vespo"}),
    "vespo_lambda_neg": (1.0, {"loss_type": "vespo"}),
    "mask_truncated_completions": (True, {}),
    "top_entropy_quantile": (0.3, {}),
    "entropy_coef": (0.1, {}),
    "use_adaptive_entropy": (True, {"entropy_target": 9.0}),
    "entropy_coef_max": (0.05, {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0}),
    "entropy_coef_delta": (0.5, {"use_adaptive_entropy": True, "entropy_target": 9.0}),
    "entropy_target": (9.0, {"use_adaptive_entropy": True}),
    "off_policy_mask_threshold": (1e-6, {}),
    "reward_weights": ([1.0, 0.1], TWO_REWARDS),
    "temperature": (0.5, {}),
    "cast_lm_head_to_fp32": (True, {"dtype": torch.bfloat16}),
    "router_aux_loss_coef": (0.5, {"moe": True}),
}
"""Option -> a value, and other settings under which it counts: the loss or its gradient changes."""
OF_THE_GROUP = {
    "scale_rewards": ("none", {}),
    "multi_objective_aggregation": ("normalize_then_sum", TWO_REWARDS),
}
"""The same for what is about group baselines, which a critic replaces."""


@pytest.fixture(scope="module")
def effects() -> dict[Any, Any]:
    """What was computed without an option, for all options that are tried under the same settings."""
    return {}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("option", LOSS_OPTIONS)
def test_loss_options(tmp_path: Path, tokenizer: Any, option: str, trainer: str, effects: dict[Any, Any]) -> None:
    value, others = LOSS_OPTIONS[option]
    key = (trainer, str(others))
    if key not in effects:
        effects[key] = effect(build_trainer(tmp_path / "without", tokenizer, trainer, **others))
    assert effects[key] != effect(build_trainer(tmp_path / "with", tokenizer, trainer, **others, **{option: value}))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_effects_are_no_chance(tmp_path: Path, tokenizer: Any, trainer: str) -> None:
    """What `test_loss_options` compares is the same where nothing was changed."""
    first, second = (effect(build_trainer(tmp_path / name, tokenizer, trainer)) for name in ("first", "second"))
    assert first == second


@pytest.mark.parametrize("trainer", TRAINERS)
def test_entropy_coef_min(tmp_path: Path, tokenizer: Any, trainer: str) -> None:
    """It acts once entropy has fallen again: what is kept for then is looked at."""
    bounded = {"use_adaptive_entropy": True, "entropy_target": 0.0, "entropy_coef": 0.1, "entropy_coef_delta": 1.0}
    for bound in (0.0, 0.05):
        trained = build_trainer(tmp_path, tokenizer, trainer, **bounded, entropy_coef_min=bound)
        effect(trained)
        assert trained.entropy_coef == bound


@pytest.mark.parametrize("option", OF_THE_GROUP)
def test_options_of_the_group(tmp_path: Path, tokenizer: Any, option: str) -> None:
    value, others = OF_THE_GROUP[option]
    without = effect(build_trainer(tmp_path / "without", tokenizer, "SO-GRPO", **others))
    assert without != effect(build_trainer(tmp_path / "with", tokenizer, "SO-GRPO", **others, **{option: value}))


def test_a_critic_replaces_the_group(tmp_path: Path, tokenizer: Any) -> None:
    without = effect(build_trainer(tmp_path / "without", tokenizer, "SO-PPO"))
    with pytest.warns(UserWarning, match="`scale_rewards='batch'` has no effect"):
        scaled = build_trainer(tmp_path / "with", tokenizer, "SO-PPO", scale_rewards="batch")
    assert without == effect(scaled)
    with pytest.raises(ValueError, match="`multi_objective_aggregation` is 'normalize_then_sum', but the critic"):
        build_trainer(tmp_path, tokenizer, "SO-PPO", multi_objective_aggregation="normalize_then_sum", **TWO_REWARDS)
