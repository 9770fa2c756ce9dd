"""The `critic/` folder: what is in it, that it comes back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from torch import Tensor, nn

from sorl_trl import load_critic
from sorl_trl.trainers.critic.checkpoint import CONFIG_FILE, find_critic, restore_critic, save_critic
from sorl_trl.trainers.critic.model import CRITIC_ATTRIBUTE, Critic, HeadCritic, ValueHead, causal_lm_of, trained_dtype
from tests.critics import ADAPTERS, FILES, critic_parameters, policy_with, random_head, with_values
from tests.policies import build_policy

KINDS = ["head", "adapter", "model"]


def changed(kind: str, **adapter: Any) -> tuple[Any, Critic]:
    """As trained for a while: the parameters of `policy_with(kind)` plus noise."""
    model, critic = policy_with(kind, **adapter)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in critic_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model, critic


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def assert_same_critic(a: Any, b: Any) -> None:
    first, second = critic_parameters(a), critic_parameters(b)
    assert first.keys() == second.keys()
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name


@pytest.mark.parametrize("kind", KINDS)
class TestFolder:
    def test_the_gathered_weights_are_what_is_written(self, tmp_path: Path, kind: str) -> None:
        """Of shards the model itself has only placeholders."""
        model, _ = changed(kind)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        empty, placeholder = policy_with(kind)
        for parameter in critic_parameters(empty).values():
            parameter.data = torch.zeros_like(parameter)
        save_critic(placeholder, empty, tmp_path, state)
        again, other = policy_with(kind)
        restore_critic(other, again, tmp_path)
        assert_same_critic(again, model)

    def test_where_the_engine_keeps_the_weights(self, tmp_path: Path, kind: str) -> None:
        model, critic = changed(kind)
        save_critic(critic, model, tmp_path, {})
        assert files(tmp_path) == {"critic_config.json"} | ({"adapter/adapter_config.json"} & FILES[kind])
        assert find_critic(tmp_path) == (tmp_path, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_read_hidden_states_of_any_length_is_refused(tmp_path: Path, kind: str) -> None:
    """Its weights fit, but its values would be others."""
    model, critic = changed(kind)
    save_critic(critic, model, tmp_path / "critic", model.state_dict())
    (tmp_path / "critic" / CONFIG_FILE).write_text(json.dumps({"kind": kind}))
    for use in (load_critic, lambda path: restore_critic(critic, model, path / "critic")):
        with pytest.raises(ValueError, match=r"The critic in .*critic is of an earlier sorl-trl"):
            use(tmp_path)


def test_a_head_beside_tuned_prompts_comes_back(tmp_path: Path) -> None:
    """There, PEFT nests the policy one level less deep."""
    tuned = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model, critic = get_peft_model(build_policy(), tuned), HeadCritic(random_head())
    causal_lm_of(model).add_module(CRITIC_ATTRIBUTE, critic)
    save_critic(critic, model, tmp_path, model.state_dict())
    other = HeadCritic(ValueHead(critic.head.weight.size(-1)))
    restore_critic(other, model, tmp_path)
    assert torch.equal(other.head.weight, critic.head.weight) and critic.head.weight.any()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_shape_of_adapter_comes_back(tmp_path: Path, adapter: str) -> None:
    """Inside of a policy, and alone."""
    model, critic = changed("adapter", **ADAPTERS[adapter])
    save_critic(critic, model, tmp_path, model.state_dict())
    again, other = policy_with("adapter", **ADAPTERS[adapter])
    restore_critic(other, again, tmp_path)
    assert_same_critic(again, model)
    build_policy().save_pretrained(tmp_path / "base")
    ids = torch.randint(4, 32, (2, 6), generator=torch.Generator().manual_seed(1))
    values = load_critic(tmp_path, base_model=str(tmp_path / "base"))(ids)
    torch.testing.assert_close(values[:, :-1], values_inside(model, ids), rtol=0, atol=1e-5)


def test_an_adapter_on_nothing_is_refused(tmp_path: Path) -> None:
    model, critic = policy_with("adapter")
    critic.config.base_model_name_or_path = None
    save_critic(critic, model, tmp_path / "critic", model.state_dict())
    with pytest.raises(ValueError, match="`base_model` is None"):
        load_critic(tmp_path)


def values_inside(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return with_values(model, ids)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_critic_has_the_dtype_that_is_trained(kind: str) -> None:
    """ZeRO-3 gathers all trained parameters into one buffer."""
    model, _ = policy_with(kind)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {trained_dtype(causal_lm_of(model))}
