"""With the turn-level features off, `SOGRPOTrainer` is `trl.GRPOTrainer`: losses, metrics and updated weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from tests.policies import build_moe_policy
from tests.training import assert_same, settings, train
from tests.trajectories import FixedRollout, length_reward, parity_reward

pytestmark = pytest.mark.trains

TRL_LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
FEATURES: dict[str, dict[str, Any]] = {
    "reference_kl": {"beta": 0.1},
    "uncorrected_kl": {"beta": 0.1, "use_bias_correction_kl": False},
    "delta": {"delta": 1.05},  # a larger one would hardly act here
    "epsilon_high": {"epsilon_high": 0.05},
    "entropy_quantile": {"top_entropy_quantile": 0.5},
    "entropy_bonus": {"entropy_coef": 0.01},
    "entropy_bonus_of_a_quantile": {"entropy_coef": 0.1, "top_entropy_quantile": 0.5},
    "adaptive_entropy": {"use_adaptive_entropy": True, "entropy_target": 3.4},
    "off_policy_mask": {"off_policy_mask_threshold": 0.005},
    "batch_scaling": {"scale_rewards": "batch"},
    "no_scaling": {"scale_rewards": "none"},
    "mask_truncated": {"mask_truncated_completions": True},
    "padded": {"pad_to_multiple_of": 16},
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "two_rewards": {"reward_funcs": [parity_reward, length_reward], "reward_weights": [1.0, 0.3]},
    "normalize_then_sum": {
        "reward_funcs": [parity_reward, length_reward],
        "multi_objective_aggregation": "normalize_then_sum",
    },
}


def parity(tmp_path: Path, tokenizer: Any, make_policy: Any = None, **overrides: Any) -> Any:
    arguments = settings(tmp_path, **overrides)
    theirs = train(GRPOTrainer, GRPOConfig, tokenizer, **arguments, model=make_policy and make_policy())
    arguments = {"importance_sampling_level": "token", **arguments, "target_kl": 0.0}
    given = {**arguments, "method": {"terms": ()}, "model": make_policy and make_policy()}
    ours = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **given)
    # TRL's clip_ratio does not count what δ stops.
    assert_same(ours, theirs, skip="clip_ratio" if "delta" in overrides else "per_second")
    return ours


@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_loss_type(tmp_path: Path, tokenizer: Any, loss_type: str, level: str) -> None:
    cap = {"epsilon_high": 1.01} if loss_type == "cispo" else {}  # of the ratio itself: 5.0 would never act here
    ours = parity(tmp_path, tokenizer, loss_type=loss_type, importance_sampling_level=level, **cap)
    logs = ours.state.log_history
    if loss_type in ("grpo", "dr_grpo", "dapo", "bnpo", "luspo"):
        assert max(log.get("clip_ratio/region_mean", 0.0) for log in logs) > 0, "nothing was clipped: a weak test"
    assert max(log.get("off_policy_age", 0.0) for log in logs) == 3  # 2 passes over 4 micro-batches, 2 per update


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(tmp_path: Path, tokenizer: Any, feature: str) -> None:
    parity(tmp_path, tokenizer, loss_type="dapo", **FEATURES[feature])


def test_lora(tmp_path: Path, tokenizer: Any) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    parity(tmp_path, tokenizer, loss_type="grpo", beta=0.1, peft_config=lora, learning_rate=5e-2)


def test_mixture_of_experts_auxiliary_loss(tmp_path: Path, tokenizer: Any) -> None:
    given = {"loss_type": "grpo", "router_aux_loss_coef": 0.1, "make_policy": build_moe_policy}
    assert "aux_loss" in parity(tmp_path, tokenizer, **given).state.log_history[0]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_one_turn_is_the_sequence_level(tmp_path: Path, tokenizer: Any, beta: float) -> None:
    """A completion of one turn: the geometric turn ratio is GSPO's sequence ratio, the turn mean is the token mean."""
    arguments = settings(tmp_path, beta=beta)
    gspo = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    rollouts = [FixedRollout(max_turns=1), FixedRollout(max_turns=1)]
    theirs = train(GRPOTrainer, GRPOConfig, tokenizer, **arguments, **gspo, rollout_func=rollouts[0])
    arguments |= {"method": {"terms": ()}, "target_kl": 0.0, "epsilon": 0.2, "scale_clip_range": False}
    ours = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **arguments, rollout_func=rollouts[1])
    # TRL's clip_ratio weighs sequences equally at the sequence level and tokens equally elsewhere.
    assert_same(ours, theirs, skip="clip_ratio")
