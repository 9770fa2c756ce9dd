"""At age 0 policy and old policy are one: whatever dropout a model brings, every ratio is 1, or it is said why not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, get_peft_model
from torch import nn
from transformers import FalconConfig, FalconForCausalLM

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from sorl_trl.trainers.checks.training_noise import disable_noise, noise_in, noise_in_config
from tests.agents import agent_policy, build_agent
from tests.critics import lora_config
from tests.policies import build_moe_policy, build_policy

TRAINERS = {
    "SO-GRPO": {"trainer_class": SOGRPOTrainer},
    "SO-PPO": {"trainer_class": SOPPOTrainer, "num_generations": 1, "per_device_train_batch_size": 2},
}


def dropout_agent(tmp_path: Path, trainer: str, **overrides: Any) -> Any:
    """LoRA as TRL's recipes have it, on a model with dropout in its attention: one update is of age 0."""
    model = agent_policy()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    peft = lora_config(lora_dropout=0.05)
    return build_agent(tmp_path, model=model, peft_config=peft, max_steps=1, **TRAINERS[trainer], **overrides)


def ratios(trainer: Any) -> tuple[float, float]:
    (log,) = (log for log in trainer.state.log_history if "loss" in log)
    assert log["off_policy_age"] == 0
    return log["turns/ratio_min"], log["turns/ratio_max"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_ratio_is_one_at_age_0(tmp_path: Path, trainer: str, caplog: pytest.LogCaptureFixture) -> None:
    """By `disable_dropout`, which nobody has set."""
    agent = dropout_agent(tmp_path, trainer)
    agent.train()
    assert ratios(agent) == pytest.approx((1.0, 1.0), abs=1e-6)
    assert "noise" not in caplog.text


@pytest.mark.parametrize("trainer", TRAINERS)
def test_dropout_that_is_wanted_is_said(tmp_path: Path, trainer: str, caplog: pytest.LogCaptureFixture) -> None:
    agent = dropout_agent(tmp_path, trainer, disable_dropout=False)
    with caplog.at_level(logging.WARNING):
        agent.train()
    low, high = ratios(agent)
    assert low < 0.99 < 1.01 < high
    assert "lora_dropout.default=0.05" in caplog.text
    assert "attention_dropout=0.1" in caplog.text
    assert "Set `disable_dropout=True`" in caplog.text


def test_noise_on_embeddings_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent = build_agent(tmp_path, neftune_noise_alpha=5.0, max_steps=1)
    with caplog.at_level(logging.WARNING):
        agent.train()
    assert ratios(agent) != pytest.approx((1.0, 1.0), abs=1e-6)
    assert "neftune_noise_alpha=5 (the embeddings)" in caplog.text
    assert "`disable_dropout` does not reach it" in caplog.text


def passes_agree(model: nn.Module) -> bool:
    ids = torch.arange(12).view(2, 6)
    model.train()
    return torch.equal(model(ids).logits, model(ids).logits)


def jittering() -> nn.Module:
    model = build_moe_policy()
    for layer in model.model.layers:
        layer.mlp.jitter_noise = 0.3
    return model


def with_dropout_layer() -> nn.Module:
    model = build_policy()
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Dropout1d(0.5))
    return model


def loha() -> nn.Module:
    config = LoHaConfig(r=2, target_modules=["q_proj"], rank_dropout=0.5, module_dropout=0.3, init_weights=False)
    return get_peft_model(build_policy(), config)


@pytest.mark.parametrize(
    ("build", "label"),
    [
        (jittering, "jitter_noise=0.3"),
        (with_dropout_layer, "=0.5"),
        (loha, "rank_dropout=0.5"),
    ],
)
def test_the_lever_reaches(build: Any, label: str) -> None:
    torch.manual_seed(0)
    model = build()
    assert any(label in noise for noise in noise_in(model))
    assert not passes_agree(model)
    disable_noise(model)
    assert noise_in(model) == []
    assert passes_agree(model)


def test_what_the_lever_does_not_reach_is_found() -> None:
    """Falcon reads its dropout from the configuration, which is saved with the model and stays as it is."""
    config = FalconConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, hidden_dropout=0.4
    )
    model = FalconForCausalLM(config)
    disable_noise(model)
    assert noise_in(model) == ["config.hidden_dropout=0.4 (transformer.h.0)"]
    assert not passes_agree(model)
    assert model.config.hidden_dropout == 0.4


def test_dropout_in_a_configuration() -> None:
    config = FalconConfig(hidden_dropout=0.4, attention_dropout=0.0)
    config.summary_first_dropout = config.classifier_dropout = 0.1
    config.router_jitter_noise = 0.01
    assert noise_in_config(config) == {"hidden_dropout": 0.4, "router_jitter_noise": 0.01}
