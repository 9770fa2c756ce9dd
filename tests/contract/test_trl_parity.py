"""With the turn-level features off, `SOGRPOTrainer` is `trl.GRPOTrainer`: losses, metrics and updated weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from tests.conftest import build_moe_policy, build_policy
from tests.trajectories import FixedRollout, length_reward, parity_reward, prompts

TRL_LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
FEATURES: dict[str, dict[str, Any]] = {
    "reference_kl": {"beta": 0.1},
    "uncorrected_kl": {"beta": 0.1, "use_bias_correction_kl": False},
    "delta": {"delta": 1.3},
    "epsilon_high": {"epsilon_high": 0.05},
    "entropy_quantile": {"top_entropy_quantile": 0.5},
    "entropy_bonus": {"entropy_coef": 0.01},
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


def settings(output_dir: Path, **overrides: Any) -> dict[str, Any]:
    """Eight updates from two generation batches, each reused twice, far enough apart for ratios to be clipped."""
    return {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "num_generations": 4,
        "max_completion_length": 24,
        "max_steps": 8,
        "learning_rate": 2e-2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        **overrides,
    }


def train(trainer_class: Any, config_class: Any, tokenizer: Any, **arguments: Any) -> Any:
    """Train on fixed trajectories; what is not a field of the config goes to the trainer."""
    to_trainer = {name: arguments.pop(name) for name in ("peft_config",) if name in arguments}
    rollout = arguments.pop("rollout_func", None) or FixedRollout()
    model = arguments.pop("model", None) or saved_policy(Path(arguments["output_dir"]))
    trainer = trainer_class(
        model,
        arguments.pop("reward_funcs", parity_reward),
        config_class(**arguments),
        prompts(),
        processing_class=tokenizer,
        rollout_func=rollout,
        **to_trainer,
    )
    trainer.train()
    return trainer


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-6, skip: str = "per_second") -> None:
    """Equal weights, and equal values of every metric that TRL logs, but for those whose name holds `skip`."""
    for (name, a), (_, b) in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
    for our_log, their_log in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        for key, value in their_log.items():
            timing = "time" in key or "per_second" in key
            if not timing and skip not in key and value is not None:
                assert our_log[key] == pytest.approx(value, abs=tolerance, nan_ok=True), key


def saved_policy(folder: Path) -> str:
    """A path, because TRL loads the reference policy from where the policy came from."""
    build_policy().save_pretrained(folder / "policy")
    return str(folder / "policy")


def parity(tmp_path: Path, tokenizer: Any, **overrides: Any) -> tuple[Any, Any]:
    arguments = settings(tmp_path, **overrides)
    theirs = train(GRPOTrainer, GRPOConfig, tokenizer, **arguments)
    arguments.setdefault("importance_sampling_level", "token")
    ours = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **arguments, clip_normalization="none", target_kl=0.0)
    assert_same(ours, theirs)
    return ours, theirs


@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_loss_type(tmp_path: Path, tokenizer: Any, loss_type: str, level: str) -> None:
    cap = {"epsilon_high": 1.01} if loss_type == "cispo" else {}  # of the ratio itself: 5.0 would never act here
    ours, _ = parity(tmp_path, tokenizer, loss_type=loss_type, importance_sampling_level=level, **cap)
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
    arguments = settings(tmp_path, loss_type="grpo", router_aux_loss_coef=0.1)
    theirs = train(GRPOTrainer, GRPOConfig, tokenizer, **arguments, model=build_moe_policy())
    off = {"importance_sampling_level": "token", "clip_normalization": "none", "target_kl": 0.0}
    ours = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **arguments, **off, model=build_moe_policy())
    assert_same(ours, theirs)
    assert "aux_loss" in ours.state.log_history[0]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_one_turn_is_the_sequence_level(tmp_path: Path, tokenizer: Any, beta: float) -> None:
    """A completion of one turn: the geometric turn ratio is GSPO's sequence ratio, the turn mean is the token mean."""
    arguments = settings(tmp_path, beta=beta, epsilon=0.2)  # turns have a range of their own unless one is set
    gspo = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    rollouts = [FixedRollout(max_turns=1), FixedRollout(max_turns=1)]
    theirs = train(GRPOTrainer, GRPOConfig, tokenizer, **arguments, **gspo, rollout_func=rollouts[0])
    ours = train(
        SOGRPOTrainer,
        SOGRPOConfig,
        tokenizer,
        **arguments,
        clip_normalization="none",
        target_kl=0.0,
        rollout_func=rollouts[1],
    )
    # TRL's clip_ratio weighs sequences equally at the sequence level and tokens equally elsewhere.
    assert_same(ours, theirs, skip="clip_ratio")


def assert_differs(ours: Any, theirs: Any) -> None:
    pairs = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) > 1e-4


@pytest.mark.parametrize(
    "switch",
    [
        {"importance_sampling_level": "turn"},
        {"importance_sampling_level": "turn", "turn_ratio": "arithmetic"},
        {"importance_sampling_level": "token", "loss_type": "turn"},
        {"importance_sampling_level": "token", "clip_normalization": "kl_penalty"},
        {"importance_sampling_level": "token", "gamma": 0.5},
    ],
)
def test_every_switch_makes_a_difference(tmp_path: Path, tokenizer: Any, switch: dict[str, Any]) -> None:
    arguments = settings(tmp_path, loss_type="grpo")
    theirs = train(GRPOTrainer, GRPOConfig, tokenizer, **arguments)
    ours = train(
        SOGRPOTrainer,
        SOGRPOConfig,
        tokenizer,
        **{**arguments, "clip_normalization": "none", "target_kl": 0.0, **switch},
    )
    assert_differs(ours, theirs)
