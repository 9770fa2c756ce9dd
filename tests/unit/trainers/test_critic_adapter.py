"""The critic's LoRA adapter beside the policy's: both train, neither gets into the other's way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, PeftModel, get_peft_model
from torch import Tensor

from sorl_trl.trainers.critic.model import (
    AdapterCritic,
    BackboneCall,
    ValueHead,
    add_critic_adapter,
    is_critic_name,
    known_adapter,
)
from tests.critics import ADAPTERS, lora_config
from tests.policies import build_policy

IDS = torch.randint(4, 32, (2, 7), generator=torch.Generator().manual_seed(5))


def peft_policy(**overrides: Any) -> PeftModel:
    torch.manual_seed(2)
    return get_peft_model(build_policy(), lora_config(**overrides))


def adapter_critic(**overrides: Any) -> tuple[PeftModel, AdapterCritic]:
    model = peft_policy(**overrides)
    head = ValueHead(16)
    torch.nn.init.normal_(head.weight)
    return model, AdapterCritic(head, model, add_critic_adapter(model))


def hidden_states(model: PeftModel, **kwargs: Any) -> Tensor:
    return model.get_base_model().base_model(input_ids=IDS, **kwargs).last_hidden_state


def trained_names(model: PeftModel) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


class TestAddCriticAdapter:
    @pytest.mark.parametrize("config", ADAPTERS)
    def test_it_alone_is_trained_besides_what_was(self, config: str) -> None:
        model = peft_policy(**ADAPTERS[config])
        before = trained_names(model)
        add_critic_adapter(model)
        own = {name for name, _ in model.named_parameters() if is_critic_name(name)}
        assert own
        assert trained_names(model) == before | own
        assert model.active_adapters == list(model.peft_config) == ["default"]

    def test_a_frozen_reference_stays_frozen(self) -> None:
        model = peft_policy()
        model.add_adapter("ref", lora_config())
        add_critic_adapter(model)
        assert not any(".ref." in name for name in trained_names(model))

    @pytest.mark.parametrize("init", ["pissa", "olora"])
    def test_no_base_model_that_is_another_one(self, init: str) -> None:
        """`load_critic` would put the critic on the original."""
        with pytest.raises(ValueError, match=rf"`init_lora_weights='{init}'` subtracts the policy's first adapter"):
            add_critic_adapter(peft_policy(init_lora_weights=init))

    @pytest.mark.parametrize("bias", ["all", "lora_only"])
    def test_no_biases_of_the_base_model(self, bias: str) -> None:
        with pytest.raises(ValueError, match=rf"`bias='{bias}'` trains biases .* `critic='adapter'` would share"):
            add_critic_adapter(peft_policy(bias=bias))

    def test_no_adapter_that_is_lora_only_by_its_class(self) -> None:
        """AdaLoRA's configuration is a subclass of LoRA's."""
        config = AdaLoraConfig(target_modules=["q_proj"], total_step=10)
        with pytest.raises(ValueError, match=r"`critic='adapter'` .* its adapter is a AdaLoraConfig"):
            add_critic_adapter(get_peft_model(build_policy(), config))

    @pytest.mark.parametrize("init", ["gaussian", True])
    def test_the_base_model_and_the_policy_stay_as_they_are(self, init: Any) -> None:
        model = peft_policy(init_lora_weights=init)
        before = {name: p.clone() for name, p in model.named_parameters()}
        expected = hidden_states(model)
        add_critic_adapter(model)
        for name, parameter in model.named_parameters():
            assert is_critic_name(name) or torch.equal(parameter, before[name]), name
        assert torch.equal(hidden_states(model), expected)


class TestActive:
    @pytest.mark.parametrize("config", ADAPTERS)
    def test_it_does_what_set_adapter_does(self, config: str) -> None:
        model, critic = adapter_critic(**ADAPTERS[config])
        before = trained_names(model)
        policy = hidden_states(model)
        with critic.active():
            ours = hidden_states(model)
        assert trained_names(model) == before
        assert torch.equal(hidden_states(model), policy)
        with known_adapter(model, critic.config):
            model.set_adapter("critic")
            assert torch.equal(ours, hidden_states(model))
        assert not torch.equal(ours, policy)

    def test_it_goes_back_after_an_error(self) -> None:
        model, critic = adapter_critic()
        policy = hidden_states(model)
        with pytest.raises(KeyError), critic.active():
            raise KeyError
        assert torch.equal(hidden_states(model), policy)

    def test_within_a_disabled_adapter(self) -> None:
        """Where the reference is scored, PEFT has switched all adapters off, and they must be off again after."""
        model, critic = adapter_critic()
        with critic.active():
            ours = hidden_states(model)
        with model.disable_adapter():
            base = hidden_states(model)
            with critic.active():
                assert torch.equal(hidden_states(model), ours)
            assert torch.equal(hidden_states(model), base)


class TestAdapterCritic:
    @pytest.mark.parametrize("config", ADAPTERS)
    def test_unfreeze_undoes_peft(self, config: str) -> None:
        """Leaving `disable_adapter` freezes every adapter but the active one."""
        model, critic = adapter_critic(**ADAPTERS[config])
        trained = trained_names(model)
        with model.disable_adapter():
            pass
        assert trained_names(model) < trained
        critic.unfreeze()
        assert trained_names(model) == trained

    @pytest.mark.parametrize("config", ADAPTERS)
    @pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
    def test_gradient_checkpointing_changes_no_gradient(self, config: str, reentrant: bool) -> None:
        """PEFT recomputes with the adapter that is active in backward: the policy's."""
        plain = self._gradients(*adapter_critic(**ADAPTERS[config]))
        model, critic = adapter_critic(**ADAPTERS[config])
        model.train()
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        checkpointed = self._gradients(model, critic)
        assert plain.keys() == checkpointed.keys()
        assert sum(is_critic_name(name) for name in plain) >= 2
        assert sum(not is_critic_name(name) for name in plain) >= 2
        for name, gradient in plain.items():
            torch.testing.assert_close(checkpointed[name], gradient, rtol=0, atol=1e-6, msg=name)

    @staticmethod
    def _gradients(model: PeftModel, critic: AdapterCritic) -> dict[str, Tensor]:
        """Of a loss of both, as one backward pass gives them."""
        policy = hidden_states(model, use_cache=False)
        call = BackboneCall(model.get_base_model().base_model, (), {"input_ids": IDS, "use_cache": False}, None)
        (policy.square().sum() + critic(call).square().sum()).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
