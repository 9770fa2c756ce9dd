"""The `critic/` folder: what is in it, that it comes back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn

from sorl_trl import load_critic
from sorl_trl.trainers.critic.build import trained_dtype
from sorl_trl.trainers.critic.checkpoint import check_critic_folder, restore_critic, save_critic
from sorl_trl.trainers.critic.model import Critic, causal_lm_of, is_critic_name
from sorl_trl.types import Action, ActionKind, Observation, StopReason, Trajectory, Turn
from tests.critics import ADAPTERS, FILES, critic_parameters, policy_with
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
    def test_what_is_in_it(self, tmp_path: Path, kind: str) -> None:
        model, critic = changed(kind)
        save_critic(critic, model, tmp_path, None)
        assert files(tmp_path) == FILES[kind]
        assert json.loads((tmp_path / "critic_config.json").read_text()) == {"kind": kind}
        assert load_file(tmp_path / "value_head.safetensors").keys() == {"weight", "bias"}

    def test_it_comes_back(self, tmp_path: Path, kind: str) -> None:
        model, critic = changed(kind)
        save_critic(critic, model, tmp_path, None)
        again, other = policy_with(kind)
        restore_critic(other, again, tmp_path)
        assert_same_critic(again, model)
        assert all(parameter.requires_grad for parameter in critic_parameters(again).values())

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
        check_critic_folder(critic, tmp_path)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_shape_of_adapter_comes_back(tmp_path: Path, adapter: str) -> None:
    """Inside of a policy, and alone."""
    model, critic = changed("adapter", **ADAPTERS[adapter])
    save_critic(critic, model, tmp_path, None)
    again, other = policy_with("adapter", **ADAPTERS[adapter])
    restore_critic(other, again, tmp_path)
    assert_same_critic(again, model)
    build_policy().save_pretrained(tmp_path / "base")
    ids = torch.randint(4, 32, (2, 6), generator=torch.Generator().manual_seed(1))
    values = load_critic(tmp_path, base_model=str(tmp_path / "base"))(ids)
    torch.testing.assert_close(values[:, :-1], values_inside(model, ids), rtol=0, atol=1e-5)


class TestRefused:
    def test_no_critic(self, tmp_path: Path) -> None:
        model, critic = policy_with("head")
        with pytest.raises(ValueError, match=r"There is no critic in .*critic_config\.json"):
            restore_critic(critic, model, tmp_path)
        with pytest.raises(ValueError, match="There is no critic in"):
            load_critic(tmp_path)

    @pytest.mark.parametrize(("saved", "wanted"), [("head", "model"), ("model", "head"), ("adapter", "head")])
    def test_another_kind(self, tmp_path: Path, saved: str, wanted: str) -> None:
        model, critic = policy_with(saved)
        save_critic(critic, model, tmp_path, None)
        model, critic = policy_with(wanted)
        message = rf"is of kind '{saved}', this run's of kind '{wanted}': set `critic='{saved}'`"
        with pytest.raises(ValueError, match=message):
            restore_critic(critic, model, tmp_path)

    def test_an_adapter_on_nothing(self, tmp_path: Path) -> None:
        model, critic = policy_with("adapter")
        critic.config.base_model_name_or_path = None
        save_critic(critic, model, tmp_path / "critic", None)
        with pytest.raises(ValueError, match="`base_model` is None"):
            load_critic(tmp_path)


@pytest.mark.parametrize("folder", ["checkpoint", "checkpoint/critic"])
@pytest.mark.parametrize(
    ("kind", "lora"), [("head", False), ("head", True), ("adapter", True), ("model", False), ("model", True)]
)
def test_a_critic_on_its_own(tmp_path: Path, kind: str, lora: bool, folder: str) -> None:
    """Beside the policy that Transformers or PEFT has saved; with the values it had inside of it."""
    model, critic = policy_with(kind, lora)
    checkpoint = tmp_path / "checkpoint"
    build_policy().save_pretrained(tmp_path / "base")
    save_critic(critic, model, checkpoint / "critic", None)
    plain = {name: t for name, t in model.state_dict().items() if not is_critic_name(name)}
    model.save_pretrained(checkpoint, state_dict=plain)
    base = {"base_model": str(tmp_path / "base")} if lora and kind != "model" else {}
    value_model = load_critic(tmp_path / folder, **base)
    ids = torch.randint(4, 32, (2, 6), generator=torch.Generator().manual_seed(1))
    values = value_model(ids)
    torch.testing.assert_close(values[:, :-1], values_inside(model, ids), rtol=0, atol=1e-5)
    assert not value_model.training
    assert values.std() > 0.1


class TestTurnValues:
    """A prompt of two tokens, then a turn of two, an observation of one, and a turn of two."""

    def trajectory(self, stop_reason: StopReason) -> Trajectory:
        segments = (
            Turn((6, 7), "", Action(ActionKind.SEARCH)),
            Observation((20,), ""),
            Turn((9, 1), "", Action(ActionKind.ANSWER)),
        )
        return Trajectory((4, 5), segments, stop_reason)

    def test_they_are_read_where_a_turn_starts(self, tmp_path: Path) -> None:
        model, critic = policy_with("model")
        save_critic(critic, model, tmp_path, None)
        longer = Trajectory((4, 5, 8), self.trajectory(StopReason.ANSWERED).segments, StopReason.ANSWERED)
        failed = self.trajectory(StopReason.SEARCH_UNAVAILABLE)
        value_model = load_critic(tmp_path)
        values = value_model.turn_values([self.trajectory(StopReason.ANSWERED), failed, longer])
        first = value_model(torch.tensor([[4, 5, 6, 7, 20, 9, 1]]))[0]
        third = value_model(torch.tensor([[4, 5, 8, 6, 7, 20, 9, 1]]))[0]
        assert values[0] == pytest.approx([first[1].item(), first[4].item()], abs=1e-6)
        assert values[1] == []
        assert values[2] == pytest.approx([third[2].item(), third[5].item()], abs=1e-6)


def values_inside(model: nn.Module, ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True, with_values=True)
    return output.critic_values


def test_peft_neither_lists_nor_saves_its_adapter(tmp_path: Path) -> None:
    model, _ = policy_with("adapter")
    assert isinstance(model, PeftModel)
    assert set(model.peft_config) == {"default"}
    model.save_pretrained(tmp_path)
    assert not any("critic" in name for name in files(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_the_critic_has_the_dtype_that_is_trained(kind: str) -> None:
    """ZeRO-3 gathers all trained parameters into one buffer."""
    model, _ = policy_with(kind)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {trained_dtype(causal_lm_of(model))}
