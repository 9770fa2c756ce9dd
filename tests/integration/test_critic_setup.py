"""Building a critic into a policy, and taking it out again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import Trainer
from transformers.trainer_utils import HubStrategy

from sorl_trl.trainers.critic.adapter import AdapterCritic
from sorl_trl.trainers.critic.model import HeadCritic, ModelCritic, is_critic_name
from tests.critics import CASES, build_ppo, critic_parameters, lora_config, moved, weights
from tests.policies import build_policy


def test_padded_vocabularies_may_differ(tmp_path: Path, tokenizer: Any) -> None:
    """Of two sizes of one family with one tokenizer, the smaller's embedding may have fewer unused rows."""
    build_policy(vocab_size=32).save_pretrained(tmp_path / "small")
    policy = build_policy(vocab_size=40)
    trainer = build_ppo(
        tmp_path, tokenizer, critic="model", model=policy, critic_model_name_or_path=str(tmp_path / "small")
    )
    assert trainer.critic.backbone.config.vocab_size == 32


def test_dropout_is_disabled_in_the_critic_too(tmp_path: Path, tokenizer: Any) -> None:
    trainer = build_ppo(tmp_path, tokenizer, peft_config=lora_config(lora_dropout=0.5), disable_dropout=True)
    rates = {name: m.p for name, m in trainer.model.named_modules() if isinstance(m, torch.nn.Dropout)}
    assert any("critic" in name for name in rates)
    assert set(rates.values()) == {0}


def test_the_model_critic_is_loaded_as_the_policy_was(tmp_path: Path, tokenizer: Any) -> None:
    policy = build_policy()
    policy.save_pretrained(tmp_path / "policy")
    options = {"attn_implementation": "eager", "revision": "v1"}
    trainer = build_ppo(tmp_path, tokenizer, critic="model", model=str(tmp_path / "policy"), model_init_kwargs=options)
    assert trainer.critic.backbone.config._attn_implementation == "eager"


def test_a_warmup_as_long_as_training_is_said(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build_ppo(tmp_path, tokenizer, critic_warmup_steps=3, max_steps=3)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "`critic_warmup_steps` is 3, and training has 3 steps: the policy will not be trained" in caplog.text


def test_a_frozen_policy_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    get_peft_model(build_policy(), lora_config()).save_pretrained(tmp_path / "adapter")
    frozen = PeftModel.from_pretrained(build_policy(), tmp_path / "adapter")
    with pytest.raises(ValueError, match="Load a PEFT model with `is_trainable=True`"):
        build_ppo(tmp_path, tokenizer, model=frozen)


def test_an_optimizer_with_named_parameters(tmp_path: Path, tokenizer: Any) -> None:
    policy = build_policy()
    optimizer = torch.optim.SGD(policy.named_parameters(), lr=0.1)
    trainer = build_ppo(tmp_path, tokenizer, model=policy, optimizers=(optimizer, None))
    trainer.create_optimizer()
    assert "critic.head.weight" in optimizer.param_groups[-1]["param_names"]


class TestDetachCritic:
    @pytest.mark.parametrize("case", ["head", "adapter"])
    def test_the_policy_alone_is_left(self, tmp_path: Path, tokenizer: Any, case: str) -> None:
        trainer = build_ppo(tmp_path, tokenizer, **CASES[case])
        trainer.train()
        model = trainer.detach_critic()
        assert not any(is_critic_name(name) for name in model.state_dict())
        model.save_pretrained(tmp_path / "by-hand")
        assert not list((tmp_path / "by-hand").rglob("*critic*"))

    @pytest.mark.parametrize("case", ["head", "adapter"])
    def test_another_trainer_may_have_the_model(self, tmp_path: Path, tokenizer: Any, case: str) -> None:
        first = build_ppo(tmp_path, tokenizer, **CASES[case])
        again = {"model": first.model, "lora": False}
        if case == "adapter":
            again["critic"] = "adapter"
        with pytest.raises(ValueError, match=r"call that trainer's `detach_critic\(\)` first"):
            build_ppo(tmp_path, tokenizer, **again)
        first.detach_critic()
        second = build_ppo(tmp_path, tokenizer, **again)
        before = weights(critic_parameters(second.model))
        second.train()
        assert moved(before, critic_parameters(second.model))


def test_pushed_checkpoints_have_the_critic(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_ppo(tmp_path, tokenizer)
    checkpoint = tmp_path / "checkpoint-1"
    trainer.save_model(str(checkpoint))
    seen: list[Path] = []

    def push(self: Any, folder: str) -> None:
        seen.extend(Path(self.args.output_dir).rglob("*"))

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    pushed = Path(trainer.args.output_dir) / "critic" / "value_head.safetensors"
    trainer.args.hub_strategy = HubStrategy.END
    trainer._push_from_checkpoint(str(checkpoint))
    assert not pushed.exists()
    trainer.args.hub_strategy = HubStrategy.EVERY_SAVE
    trainer._push_from_checkpoint(str(checkpoint))
    assert pushed in seen


class TestStart:
    """`critic_model_name_or_path` names a critic by its folder or by the checkpoint that it lies in."""

    @pytest.mark.parametrize("case", ["head", "adapter", "model"])
    def test_both_are_the_same(self, tmp_path: Path, tokenizer: Any, case: str) -> None:
        first = build_ppo(tmp_path, tokenizer, **CASES[case])
        with torch.no_grad():
            for parameter in critic_parameters(first.model).values():
                parameter.add_(0.1)
        first.save_model(str(tmp_path / "checkpoint"))
        saved = weights(critic_parameters(first.model))
        for path in (tmp_path / "checkpoint", tmp_path / "checkpoint" / "critic"):
            second = build_ppo(tmp_path, tokenizer, **{**CASES[case], "critic_model_name_or_path": str(path)})
            assert not moved(saved, critic_parameters(second.model)), path

    @pytest.mark.parametrize(("field", "value"), [("r", 4), ("lora_alpha", 64), ("target_modules", ["q_proj"])])
    def test_another_adapter_is_refused(self, tmp_path: Path, tokenizer: Any, field: str, value: Any) -> None:
        first = build_ppo(tmp_path, tokenizer, lora=True)
        first.save_model(str(tmp_path / "checkpoint"))
        other = lora_config(**{field: value})
        with pytest.raises(ValueError, match=f"has `{field}`"):
            build_ppo(tmp_path, tokenizer, peft_config=other, critic_model_name_or_path=str(tmp_path / "checkpoint"))


@pytest.mark.parametrize("critic", [None, "head", "adapter", "model"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_each_kind_of_critic(tmp_path: Path, tokenizer: Any, critic: str | None, lora: bool) -> None:
    """Without a choice, an adapter where there is PEFT, a head where there is none."""
    if critic == "adapter" and not lora:
        pytest.skip("an adapter needs PEFT: tests/integration/test_critic_options.py")
    kinds = {"head": HeadCritic, "adapter": AdapterCritic, "model": ModelCritic}
    expected = kinds[critic or ("adapter" if lora else "head")]
    assert type(build_ppo(tmp_path, tokenizer, critic=critic, lora=lora).critic) is expected


@pytest.mark.parametrize("ddp_find_unused_parameters", [False, True])
def test_the_search_for_unused_parameters(tmp_path: Path, tokenizer: Any, ddp_find_unused_parameters: bool) -> None:
    """What DDP would be told; several processes are not needed to see it."""
    trainer = build_ppo(tmp_path, tokenizer, ddp_find_unused_parameters=ddp_find_unused_parameters)
    assert trainer.accelerator.ddp_handler.find_unused_parameters is ddp_find_unused_parameters
