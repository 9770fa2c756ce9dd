"""Critics of a tiny policy: what values mean, that critic and policy leave each other alone, and `critic/`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, PeftModel, get_peft_model
from torch import Tensor

from sorl_trl import load_critic
from sorl_trl.trainers.critic import (
    AdapterCritic,
    BackboneCall,
    Critic,
    ValueHead,
    add_critic_adapter,
    is_critic_name,
    known_adapter,
)
from sorl_trl.trainers.critic_checkpoint import CONFIG_FILE, ValueModel, find_critic, restore_critic, save_critic
from sorl_trl.types import StopReason
from tests.critics import ADAPTERS, critic_parameters, lora_config, policy_with, random_head, with_values
from tests.policies import build_policy
from tests.unit.evaluation.trajectories import TWO_AGENTS

IDS = torch.randint(4, 32, (3, 9), generator=torch.Generator().manual_seed(5))


class TestValueHead:
    def test_a_hand_worked_value(self) -> None:
        """(6, 0, 8, 0) has a norm of 10, and the root of 4 is 2: (4 · 6 + 2 · 8) / 20 + 0.5."""
        head = ValueHead(4)
        head.weight.data, head.bias.data = torch.tensor([[4.0, -1.0, 2.0, 5.0]]), torch.tensor([0.5])
        assert head(torch.tensor([[[6.0, 0.0, 8.0, 0.0], [0.0] * 4]])).tolist() == [[pytest.approx(2.5), 0.5]]

    def test_computes_in_float32(self) -> None:
        """1/256 is lost when bfloat16 numbers near 1 are added."""
        head = ValueHead(4, torch.bfloat16)
        head.weight.data.copy_(torch.tensor([[2.0, 2**-7, 0.0, 0.0]]))
        with torch.autocast("cpu", torch.bfloat16):
            values = head(torch.ones((1, 1, 4), dtype=torch.bfloat16))
        assert values.dtype == torch.float32
        assert values.item() == 0.5 + 2**-9


# ---------------------------------------------------------------------------------------------------------------------
# The adapter beside the policy's
# ---------------------------------------------------------------------------------------------------------------------


def peft_policy(**overrides: Any) -> PeftModel:
    torch.manual_seed(2)
    return get_peft_model(build_policy(), lora_config(**overrides))


def adapter_critic(**overrides: Any) -> tuple[PeftModel, AdapterCritic]:
    model = peft_policy(**overrides)
    return model, AdapterCritic(random_head(), model, add_critic_adapter(model))


def hidden_states(model: PeftModel, **kwargs: Any) -> Tensor:
    return model.get_base_model().base_model(input_ids=IDS, **kwargs).last_hidden_state


def trained_names(model: PeftModel) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def gradients(model: PeftModel, critic: AdapterCritic) -> dict[str, Tensor]:
    """Of a loss of both, as one backward pass gives them."""
    policy = hidden_states(model, use_cache=False)
    call = BackboneCall(model.get_base_model().base_model, (), {"input_ids": IDS, "use_cache": False}, None)
    (policy.square().sum() + critic(call).square().sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("config", ADAPTERS)
class TestAdapter:
    def test_it_alone_is_trained_besides_what_was(self, config: str) -> None:
        """And again after PEFT has frozen every adapter but the active one, on leaving `disable_adapter`."""
        model = peft_policy(**ADAPTERS[config])
        before = trained_names(model)
        critic = AdapterCritic(random_head(), model, add_critic_adapter(model))
        own = {name for name, _ in model.named_parameters() if is_critic_name(name)}
        assert own
        assert trained_names(model) == before | own
        assert model.active_adapters == list(model.peft_config) == ["default"]
        with model.disable_adapter():
            pass
        assert trained_names(model) < before | own
        critic.unfreeze()
        assert trained_names(model) == before | own

    def test_active_does_what_set_adapter_does(self, config: str) -> None:
        model, critic = adapter_critic(**ADAPTERS[config])
        before, policy = trained_names(model), hidden_states(model)
        with critic.active():
            ours = hidden_states(model)
        assert trained_names(model) == before
        assert torch.equal(hidden_states(model), policy)
        with known_adapter(model, critic.config):
            model.set_adapter("critic")
            assert torch.equal(ours, hidden_states(model))
        assert not torch.equal(ours, policy)

    @pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
    def test_gradient_checkpointing_changes_no_gradient(self, config: str, reentrant: bool) -> None:
        """PEFT recomputes with the adapter that is active in backward: the policy's."""
        plain = gradients(*adapter_critic(**ADAPTERS[config]))
        model, critic = adapter_critic(**ADAPTERS[config])
        model.train()
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        checkpointed = gradients(model, critic)
        assert plain.keys() == checkpointed.keys()
        assert sum(is_critic_name(name) for name in plain) >= 2
        assert sum(not is_critic_name(name) for name in plain) >= 2
        for name, gradient in plain.items():
            torch.testing.assert_close(checkpointed[name], gradient, rtol=0, atol=1e-6, msg=name)


def test_active_leaves_things_as_they_were() -> None:
    """After an error, and where the reference is scored, for which PEFT has switched all adapters off."""
    model, critic = adapter_critic()
    policy = hidden_states(model)
    with pytest.raises(KeyError), critic.active():
        ours = hidden_states(model)
        raise KeyError
    assert torch.equal(hidden_states(model), policy)
    with model.disable_adapter():
        base = hidden_states(model)
        with critic.active():
            assert torch.equal(hidden_states(model), ours)
        assert torch.equal(hidden_states(model), base)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (lora_config(init_lora_weights="pissa"), "`init_lora_weights='pissa'`"),  # another base model
        (lora_config(bias="lora_only"), "`bias='lora_only'`"),  # its biases would be the critic's, too
        (AdaLoraConfig(target_modules=["q_proj"], total_step=10), "AdaLoraConfig"),  # a subclass of LoRA's
    ],
    ids=["pissa", "bias", "adalora"],
)
def test_an_adapter_that_a_critic_cannot_stand_beside_is_refused(config: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        add_critic_adapter(get_peft_model(build_policy(), config))


# ---------------------------------------------------------------------------------------------------------------------
# The `critic/` folder
# ---------------------------------------------------------------------------------------------------------------------


def changed(kind: str, **adapter: Any) -> tuple[Any, Critic]:
    """As trained for a while: the parameters of `policy_with(kind)` plus noise."""
    model, critic = policy_with(kind, **adapter)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in critic_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model, critic


def assert_same_critic(a: Any, b: Any) -> None:
    first, second = critic_parameters(a), critic_parameters(b)
    assert first.keys() == second.keys()
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name


@pytest.mark.parametrize("kind", ["head", "adapter", "model"])
def test_where_the_engine_keeps_the_weights(tmp_path: Path, kind: str) -> None:
    model, critic = changed(kind)
    save_critic(critic, model, tmp_path, {})
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"critic_config.json", *(["adapter/adapter_config.json"] if kind == "adapter" else [])}
    assert find_critic(tmp_path) == (tmp_path, kind)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_shape_of_adapter_comes_back(tmp_path: Path, adapter: str) -> None:
    """Inside of a policy, and alone, for which the base model must be known."""
    model, critic = changed("adapter", **ADAPTERS[adapter])
    critic.config.base_model_name_or_path = None
    save_critic(critic, model, tmp_path, model.state_dict())
    again, other = policy_with("adapter", **ADAPTERS[adapter])
    restore_critic(other, again, tmp_path)
    assert_same_critic(again, model)
    with pytest.raises(ValueError, match="`base_model` is None"):
        load_critic(tmp_path)
    build_policy().save_pretrained(tmp_path / "base")
    with torch.no_grad():
        inside = with_values(model, IDS)[1]
    values = load_critic(tmp_path, base_model=str(tmp_path / "base"))(IDS)
    torch.testing.assert_close(values[:, :-1], inside, rtol=0, atol=1e-5)


def test_turn_values_are_of_what_was_read_in_each_context() -> None:
    """The value of a text is the sum of its tokens. Nothing was read before a turn that is not trained on."""

    def backbone(input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=input_ids.cumsum(1).float())

    critic = ValueModel(Part(backbone), Part(lambda hidden: hidden))
    down = replace(TWO_AGENTS, stop_reason=StopReason.ENVIRONMENT_UNAVAILABLE)
    assert critic.turn_values([down, TWO_AGENTS]) == [[], [5.0, 19.0, 4.0, 42.0, 47.0]]
    assert critic.turn_values([down]) == [[]]


class Part(torch.nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.forward, self.weight = forward, torch.zeros(1)


def test_a_head_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    """Its weights fit, but it reads hidden states of any length: its values would be others."""
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"kind": "head"}))
    with pytest.raises(ValueError, match="earlier sorl-trl"):
        load_critic(tmp_path)
