"""Every kind of critic in training: who learns from what, and that engines and options see one ordinary model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from sorl_trl import SOPPOConfig
from sorl_trl.trainers.critic.checkpoint import setup_critic
from tests.critics import (
    BATCH_SIZE,
    CASES,
    build_ppo,
    critic_parameters,
    logs,
    lora_config,
    moved,
    policy_parameters,
    rollout_batch,
    set_head,
    trainable,
    trained,
    weights,
)
from tests.training import saved_policy, settings


class TestWhoLearns:
    @pytest.mark.parametrize("case", CASES)
    def test_critic_and_policy_move(self, tmp_path: Path, tokenizer: Any, case: str) -> None:
        trainer, before = trained(tmp_path, tokenizer, **CASES[case])
        changed = moved(before, dict(trainer.model.named_parameters()))
        critic = critic_parameters(trainer.model)
        assert trainable(critic) == critic.keys()
        # Embeddings of words that never occur stay where they are, but a table as a whole moves.
        assert changed == trainable(dict(trainer.model.named_parameters()))
        assert all(torch.isfinite(p).all() for p in trainer.model.parameters())

    @pytest.mark.parametrize("case", CASES)
    def test_the_value_loss_trains_the_critic_alone(self, tmp_path: Path, tokenizer: Any, case: str) -> None:
        """But for the trunk's gradient, the policy's is bitwise the one it has without a value loss."""
        gradients = []
        for vf_coef in (0.0, 1.0):
            trainer = build_ppo(tmp_path, tokenizer, vf_coef=vf_coef, **CASES[case])
            set_head(trainer)
            loss = trainer._compute_loss(trainer.model, rollout_batch(trainer))
            trainer.model.zero_grad()
            loss.backward()
            gradients.append({name: p.grad for name, p in policy_parameters(trainer.model).items() if p.requires_grad})
            critic = [p.grad for p in critic_parameters(trainer.model).values()]
            assert any(g is not None and g.any() for g in critic) == (vf_coef > 0)
        without, with_loss = gradients
        assert any(g.any() for g in without.values())
        same = all(torch.equal(without[name], with_loss[name]) for name in without)
        assert same == (case != "trunk")

    @pytest.mark.parametrize("case", ["head", "adapter", "model"])
    def test_the_policys_step_does_not_depend_on_the_scale_of_the_value_loss(
        self, tmp_path: Path, tokenizer: Any, case: str
    ) -> None:
        """Although both gradients are clipped, and the critic's is a thousand times as large."""
        ends, norms = [], []
        for vf_coef in (1.0, 1000.0):
            trainer, before = trained(
                tmp_path, tokenizer, **CASES[case], optim="sgd", max_steps=1, max_grad_norm=1e-3, vf_coef=vf_coef
            )
            ends.append(weights(policy_parameters(trainer.model)))
            norms.append([trainer.state.log_history[0][name] for name in ("grad_norm", "critic/grad_norm")])
            assert moved(before, ends[-1]) and moved(before, critic_parameters(trainer.model))
        assert not moved(*ends)
        (policy, critic), others = norms
        assert policy > 1e-3
        assert others == pytest.approx([policy, 1000 * critic], rel=1e-4)

    @pytest.mark.parametrize("case", ["head", "trunk", "adapter", "model"])
    def test_warm_up(self, tmp_path: Path, tokenizer: Any, case: str) -> None:
        """The policy, AdamW's weight decay included, stands still; the trunk's gradient does not move it either."""
        overrides = {**CASES[case], "critic_warmup_steps": 2, "weight_decay": 0.1}
        trainer, before = trained(tmp_path, tokenizer, **overrides, max_steps=2)
        changed = moved(before, dict(trainer.model.named_parameters()))
        assert changed == critic_parameters(trainer.model).keys()
        trainer, before = trained(tmp_path, tokenizer, **overrides, max_steps=3)
        changed = moved(before, dict(trainer.model.named_parameters()))
        assert changed >= trainable(policy_parameters(trainer.model))

    @pytest.mark.parametrize("critic", ["adapter", "head", "model"])
    def test_a_ready_adapter_keeps_its_frozen_reference(self, tmp_path: Path, tokenizer: Any, critic: str) -> None:
        """With `beta`, TRL copies the adapter as the reference, and PEFT freezes what it does not switch to."""
        trainer, before = trained(tmp_path, tokenizer, critic=critic, model=ready_adapter(tmp_path), beta=0.1)
        changed = moved(before, dict(trainer.model.named_parameters()))
        assert changed >= critic_parameters(trainer.model).keys()
        assert any(".default." in name for name in changed)
        assert any(".ref." in name for name in before)
        assert not any(".ref." in name for name in changed)
        assert not any("lora" not in name and "critic" not in name for name in changed)
        rollout_batch(trainer)  # the pass of the reference is over before wrapped models look at what is trained
        critic_weights = critic_parameters(trainer.model)
        assert trainable(critic_weights) == critic_weights.keys()


def ready_adapter(folder: Path) -> PeftModel:
    """A policy whose adapter has been trained before, under the name "default"."""
    torch.manual_seed(4)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(saved_policy(folder)), lora_config())


class TestSameModel:
    @pytest.mark.parametrize("case", ["trunk", "adapter", "model"])
    def test_gradient_checkpointing(self, tmp_path: Path, tokenizer: Any, case: str) -> None:
        """Adam is off: it would blow up rounding differences."""
        runs = []
        for checkpointing in (
            {"gradient_checkpointing": False},
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        ):
            trainer, before = trained(
                tmp_path, tokenizer, **CASES[case], **checkpointing, max_steps=3, optim="sgd", learning_rate=1.0,
                value_head_learning_rate=1.0, critic_learning_rate=None if case == "trunk" else 1.0,
            )  # fmt: skip
            backbones = [m for m in trainer.model.modules() if getattr(m, "gradient_checkpointing", False)]
            assert bool(backbones) == checkpointing["gradient_checkpointing"]
            runs.append(trainer)
            if case == "adapter":
                adapters = [name for name in moved(before, critic_parameters(trainer.model)) if "lora" in name]
                assert len(adapters) == 4
        plain, other = runs
        parameters = dict(other.model.named_parameters())
        for name, parameter in plain.model.named_parameters():
            torch.testing.assert_close(parameters[name], parameter, rtol=0, atol=1e-6, msg=name)
        for ours, theirs in zip(logs(other), logs(plain), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)

    @pytest.mark.parametrize("case", ["head", "adapter", "model"])
    @pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
    def test_low_precision(self, tmp_path: Path, tokenizer: Any, case: str, precision: str) -> None:
        """The first losses agree with float32's as far as 8 bits go; the critic moves, its values are float32."""
        exact, _ = trained(tmp_path, tokenizer, **CASES[case])
        low = {"bf16": True} if precision == "autocast" else {"model_init_kwargs": {"dtype": "bfloat16"}}
        trainer, before = trained(tmp_path, tokenizer, **CASES[case], **low)
        own = critic_parameters(trainer.model)
        assert moved(before, own) == own.keys()
        batch = rollout_batch(trainer)
        assert batch["old_values"].dtype == batch["returns"].dtype == torch.float32
        for name in ("critic/value_loss", "critic/return_mean"):
            theirs = exact.state.log_history[0][name]
            assert trainer.state.log_history[0][name] == pytest.approx(theirs, rel=0.05, abs=0.02)

    @pytest.mark.parametrize("case", ["adapter", "model"])
    def test_one_forward_for_each_micro_batch(self, tmp_path: Path, tokenizer: Any, case: str) -> None:
        """What engines count on: one call of the wrapped model, one backward."""
        trainer = build_ppo(tmp_path, tokenizer, **CASES[case], max_steps=2, num_iterations=1)
        calls: list[bool] = []
        trainer.model.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        trainer.train()
        assert calls.count(False) == 3 + BATCH_SIZE // 4  # layouts are tried out; the old policy, 4 rows at a time
        assert calls.count(True) == 2 * 2  # steps x micro-batches

    def test_the_critic_is_the_same_whatever_was_sampled_before(self, tmp_path: Path) -> None:
        """Every rank has its own random state by then, and the policy's sampling must not notice the critic."""
        config = SOPPOConfig(**settings(tmp_path, num_generations=1))
        made = []
        for seed in (1, 2):
            model = ready_adapter(tmp_path)
            torch.manual_seed(seed)
            expected = torch.get_rng_state()
            setup_critic(model, config, vocabulary=32)
            assert torch.equal(torch.get_rng_state(), expected)
            made.append(weights(critic_parameters(model)))
        assert not moved(made[0], made[1])
