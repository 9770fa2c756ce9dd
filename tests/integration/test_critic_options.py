"""Learning rates, optimizers and models with a critic, what is refused, and a critic that is taken out again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaModel, TrainerCallback
from transformers.trainer_pt_utils import get_parameter_names

from tests.critics import (
    CASES,
    build_ppo,
    critic_parameters,
    lora_config,
    moved,
    policy_parameters,
    trainable,
    trained,
    weights,
)
from tests.policies import build_policy
from tests.training import saved_policy


@dataclass
class Rates(TrainerCallback):
    """The learning rates with which each step was taken: the policy's, then the critic's."""

    policy: list[float] = field(default_factory=list)
    critic: list[float] = field(default_factory=list)

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        groups = getattr(optimizer, "optimizer", optimizer).param_groups
        (policy,) = {group["lr"] for group in groups if not group.get("critic")}
        (critic,) = {group["lr"] for group in groups if group.get("critic")}
        self.policy.append(policy)
        self.critic.append(critic)


class TestLearningRates:
    def rates(self, tmp_path: Path, tokenizer: Any, **overrides: Any) -> Rates:
        rates = Rates()
        trainer = build_ppo(tmp_path, tokenizer, callbacks=[rates], max_steps=4, **overrides)
        trainer.train()
        return rates

    def test_after_warm_up_the_policys_is_the_schedules(self, tmp_path: Path, tokenizer: Any) -> None:
        overrides = {"learning_rate": 1e-3, "value_head_learning_rate": 4e-2, "lr_scheduler_type": "cosine"}
        plain = self.rates(tmp_path, tokenizer, **overrides)
        warm = self.rates(tmp_path, tokenizer, **overrides, critic_warmup_steps=2)
        assert warm.policy == [0.0, 0.0, *plain.policy[2:]]
        assert warm.critic == plain.critic

    def test_a_schedule_that_looks_at_the_loss_has_no_warm_up(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer = build_ppo(
            tmp_path, tokenizer, critic_warmup_steps=2, lr_scheduler_type="reduce_lr_on_plateau",
            eval_strategy="steps", eval_steps=1, num_generations_eval=1, eval_dataset=[{"prompt": "w1"}],
        )  # fmt: skip
        with pytest.raises(ValueError, match=r"`critic_warmup_steps` is 2, but the ReduceLROnPlateau"):
            trainer.create_optimizer_and_scheduler(4)

    @pytest.mark.parametrize("case", CASES)
    def test_every_trained_parameter_is_in_one_group(self, tmp_path: Path, tokenizer: Any, case: str) -> None:
        """And decays, or does not, as Transformers says; the head does not."""
        trainer = build_ppo(tmp_path, tokenizer, weight_decay=0.1, learning_rate=2e-2, **CASES[case])
        rate = 2e-2 if case == "model_lora" else 2e-1
        optimizer = trainer.create_optimizer()
        assert trainer.create_optimizer() is optimizer
        names = {id(p): name for name, p in trainer.model.named_parameters()}
        groups = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(groups)
        assert groups.keys() == trainable(dict(trainer.model.named_parameters()))
        decays = set(trainer.get_decay_parameter_names(trainer.model))
        assert decays < set(get_parameter_names(trainer.model, []))
        for name, group in groups.items():
            assert group.get("critic", False) == (name in critic_parameters(trainer.model)), name
            is_head = ".critic.head." in f".{name}"
            assert group["lr"] == (0.1 if is_head else rate if group.get("critic") else 2e-2), name
            assert group["weight_decay"] == (0.1 if name in decays and not is_head else 0.0), name

    @pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
    def test_the_users_own_optimizer(self, tmp_path: Path, tokenizer: Any, lora: bool) -> None:
        """It was made before there was a critic: the critic joins it."""
        model: Any = build_policy()
        if lora:
            torch.manual_seed(4)
            model = get_peft_model(model, lora_config())
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.5)
        trainer = build_ppo(
            tmp_path, tokenizer, model=model, optimizers=(optimizer, None), max_steps=4, critic_warmup_steps=1,
            value_head_learning_rate=0.05, critic_learning_rate=0.03 if lora else None,
        )  # fmt: skip
        before = weights(dict(trainer.model.named_parameters()))
        trainer.train()
        own = critic_parameters(trainer.model)
        assert moved(before, own) == own.keys()
        groups = [group for group in optimizer.param_groups if group.get("critic")]
        assert {group["momentum"] for group in groups} == {0.5}
        rates = {id(p): group["initial_lr"] for group in groups for p in group["params"]}
        assert rates == {id(p): 0.05 if "critic.head." in name else 0.03 for name, p in own.items()}
        assert moved(before, policy_parameters(trainer.model))


class TestRefused:
    def test_the_users_own_scheduler(self, tmp_path: Path, tokenizer: Any) -> None:
        """It would know nothing of the critic's group of parameters."""
        model = build_policy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        with pytest.raises(ValueError, match="`optimizers` has a scheduler"):
            build_ppo(tmp_path, tokenizer, model=model, optimizers=(optimizer, scheduler))

    def test_a_credit_of_the_methods_own(self, tmp_path: Path, tokenizer: Any) -> None:
        with pytest.raises(ValueError, match=r"`credit` of the method is LeaveOneOut\(\), but advantages come from"):
            build_ppo(tmp_path, tokenizer, method="loop")

    def test_a_head_has_no_other_rate(self, tmp_path: Path, tokenizer: Any) -> None:
        with pytest.raises(ValueError, match=r"`critic_learning_rate` is 0.01, .* set `value_head_learning_rate`"):
            build_ppo(tmp_path, tokenizer, critic_learning_rate=0.01)

    def test_an_adapter_needs_peft(self, tmp_path: Path, tokenizer: Any) -> None:
        with pytest.raises(ValueError, match="`critic='adapter'` needs a PEFT model"):
            build_ppo(tmp_path, tokenizer, critic="adapter")

    def test_only_lora(self, tmp_path: Path, tokenizer: Any) -> None:
        other = IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
        with pytest.raises(ValueError, match="its adapter is a IA3Config"):
            build_ppo(tmp_path, tokenizer, peft_config=other)
        trained(tmp_path, tokenizer, peft_config=other, critic="head", max_steps=1)

    def test_a_model_must_read_the_policys_tokens(self, tmp_path: Path, tokenizer: Any) -> None:
        build_policy(vocab_size=20).save_pretrained(tmp_path / "small")
        with pytest.raises(ValueError, match="has a vocabulary of 20, but the tokenizer knows 32 tokens"):
            build_ppo(tmp_path, tokenizer, critic="model", critic_model_name_or_path=str(tmp_path / "small"))

    def test_a_model_must_come_from_somewhere(self, tmp_path: Path, tokenizer: Any) -> None:
        with pytest.raises(ValueError, match=r"was not loaded from one. Set `critic_model_name_or_path`"):
            build_ppo(tmp_path, tokenizer, critic="model", model=build_policy())

    @pytest.mark.parametrize("case", ["head", "adapter"])
    def test_only_a_critics_folder(self, tmp_path: Path, tokenizer: Any, case: str) -> None:
        with pytest.raises(
            ValueError, match=rf"which holds no critic. `critic='{case.split('_')[0]}'` can only start from"
        ):
            build_ppo(tmp_path, tokenizer, **CASES[case], critic_model_name_or_path=saved_policy(tmp_path))

    @pytest.mark.parametrize("path", ["saved", "saved/critic"])
    def test_no_critic_of_another_kind(self, tmp_path: Path, tokenizer: Any, path: str) -> None:
        build_ppo(tmp_path, tokenizer, critic="head").save_model(str(tmp_path / "saved"))
        with pytest.raises(ValueError, match="of kind 'head', this run's of kind 'model'"):
            build_ppo(tmp_path, tokenizer, critic="model", critic_model_name_or_path=str(tmp_path / path))


def test_a_frozen_policy_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    get_peft_model(build_policy(), lora_config()).save_pretrained(tmp_path / "adapter")
    frozen = PeftModel.from_pretrained(build_policy(), tmp_path / "adapter")
    with pytest.raises(ValueError, match="Load a PEFT model with `is_trainable=True`"):
        build_ppo(tmp_path, tokenizer, model=frozen)


def test_a_larger_model_as_the_critic(tmp_path: Path, tokenizer: Any) -> None:
    """Of another width and more words."""
    config = LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaModel(config).save_pretrained(tmp_path / "large")
    trainer, before = trained(
        tmp_path, tokenizer, critic="model", critic_model_name_or_path=str(tmp_path / "large"), max_steps=2
    )
    assert trainer.critic.head.weight.shape == (1, 24)
    own = critic_parameters(trainer.model)
    assert moved(before, own) == own.keys()


def test_the_model_critic_is_loaded_as_the_policy_was(tmp_path: Path, tokenizer: Any) -> None:
    policy = build_policy()
    policy.save_pretrained(tmp_path / "policy")
    options = {"attn_implementation": "eager", "revision": "v1"}
    trainer = build_ppo(tmp_path, tokenizer, critic="model", model=str(tmp_path / "policy"), model_init_kwargs=options)
    assert trainer.critic.backbone.config._attn_implementation == "eager"


def test_a_policy_has_one_critic(tmp_path: Path, tokenizer: Any) -> None:
    first = build_ppo(tmp_path, tokenizer, **CASES["head"])
    with pytest.raises(ValueError, match="already has the critic"):
        build_ppo(tmp_path, tokenizer, model=first.model, critic="head")


@pytest.mark.parametrize("case", ["head", "adapter", "model"])
def test_a_critic_is_named_by_its_folder_or_by_its_checkpoint(tmp_path: Path, tokenizer: Any, case: str) -> None:
    first = build_ppo(tmp_path, tokenizer, **CASES[case])
    with torch.no_grad():
        for parameter in critic_parameters(first.model).values():
            parameter.add_(0.1)
    first.save_model(str(tmp_path / "checkpoint"))
    saved = weights(critic_parameters(first.model))
    for path in (tmp_path / "checkpoint", tmp_path / "checkpoint" / "critic"):
        second = build_ppo(tmp_path, tokenizer, **{**CASES[case], "critic_model_name_or_path": str(path)})
        assert not moved(saved, critic_parameters(second.model)), path
