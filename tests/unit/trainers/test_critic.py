"""Critics attached to a tiny policy: what values mean, whom they train, and that the policy alone has none of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl.trainers.critic.adapter import known_adapter
from sorl_trl.trainers.critic.model import Critic, ValueHead
from tests.critics import critic_parameters, policy_with
from tests.policies import build_policy

KINDS = ["head", "trunk", "adapter", "model"]
LENGTH = 9


def batch(rows: int = 3) -> dict[str, Tensor]:
    """The last row is padded on the left, the second on the right, as prompts and completions are."""
    ids = torch.randint(4, 32, (rows, LENGTH), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[-1, :2] = 0
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def scored(model: Any, inputs: dict[str, Tensor]) -> Any:
    return model(**inputs, labels=inputs["input_ids"], fused_lm_head=True, with_values=True)


def expected_values(model: Any, critic: Critic, kind: str, inputs: dict[str, Tensor]) -> Tensor:
    """The head on the last hidden states that Transformers itself gives, state by state."""
    network = build_policy(seed=1) if kind == "model" else model
    if kind == "adapter":
        with known_adapter(model, critic.config):
            model.set_adapter("critic")
            states = network(**inputs, output_hidden_states=True).hidden_states[-1]
            model.set_adapter("default")
    else:
        states = network(**inputs, output_hidden_states=True).hidden_states[-1]
    weight, bias = critic.head.weight[0], critic.head.bias[0]
    rows, length, _ = states.shape
    return torch.stack([torch.stack([states[i, t] @ weight + bias for t in range(length)]) for i in range(rows)])


class TestValueHead:
    def test_a_new_one_says_zero(self) -> None:
        assert torch.equal(ValueHead(16)(torch.randn(2, 3, 16)), torch.zeros(2, 3))

    def test_a_hand_worked_value(self) -> None:
        head = ValueHead(2)
        head.weight.data, head.bias.data = torch.tensor([[2.0, -1.0]]), torch.tensor([0.5])
        assert head(torch.tensor([[[1.0, 3.0], [0.0, 0.0]]])).tolist() == [[-0.5, 0.5]]

    def test_computes_in_float32(self) -> None:
        """1/256 is lost when bfloat16 numbers near 1 are added."""
        head = ValueHead(2, torch.bfloat16)
        head.weight.data.fill_(1.0)
        states = torch.tensor([[[1.0, 2**-8]]], dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            values = head(states)
        assert values.dtype == torch.float32
        assert values.item() == 1 + 2**-8


@pytest.mark.parametrize("kind", KINDS)
class TestValues:
    def test_value_beside_a_token_is_that_of_the_state_before_it(self, kind: str) -> None:
        model, critic = policy_with(kind)
        inputs = batch()
        output = scored(model, inputs)
        expected = expected_values(model, critic, kind, inputs)
        assert output.critic_values.shape == output.log_probs.shape == (3, LENGTH - 1)
        torch.testing.assert_close(output.critic_values, expected[:, :-1], rtol=0, atol=1e-6)
        assert expected.std() > 0.1

    def test_the_policy_says_what_it_says_without(self, kind: str) -> None:
        model, _ = policy_with(kind)
        inputs = batch()
        with_values = scored(model, inputs)
        without = model(**inputs, labels=inputs["input_ids"], fused_lm_head=True)
        assert torch.equal(with_values.log_probs, without.log_probs)
        assert torch.equal(with_values.entropy, without.entropy)
        assert not hasattr(without, "critic_values")
        assert "logits" in model(**inputs)


def test_an_adapter_that_peft_has_frozen_is_trained_again() -> None:
    """Trap: PEFT sets `requires_grad` to False on the adapters that it switches away from."""
    model, _ = policy_with("adapter")
    with model.disable_adapter():
        pass
    scored(model, batch()).critic_values.sum().backward()
    assert all(p.grad is not None for p in critic_parameters(model).values())
