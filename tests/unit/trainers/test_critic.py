"""Critics attached to a tiny policy: what values mean, whom they train, and that the policy alone has none of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from sorl_trl.trainers.critic.model import Critic, ValueHead, known_adapter
from sorl_trl.trainers.so_ppo_trainer import clip_apart
from tests.critics import critic_parameters, policy_with, with_values
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
    return torch.stack([torch.stack([value_of(critic.head, state) for state in row]) for row in states])


def value_of(head: ValueHead, state: Tensor) -> Tensor:
    """The formula in the head's docstring."""
    return state @ head.weight[0] / (state.numel() ** 0.5 * state.square().sum().sqrt()) + head.bias[0]


class TestValueHead:
    def test_a_new_one_says_zero(self) -> None:
        assert torch.equal(ValueHead(16)(torch.randn(2, 3, 16)), torch.zeros(2, 3))

    def test_a_hand_worked_value(self) -> None:
        """(6, 0, 8, 0) has a norm of 10, and the root of 4 is 2: (4 · 6 + 2 · 8) / 20 + 0.5."""
        head = ValueHead(4)
        head.weight.data, head.bias.data = torch.tensor([[4.0, -1.0, 2.0, 5.0]]), torch.tensor([0.5])
        assert head(torch.tensor([[[6.0, 0.0, 8.0, 0.0], [0.0] * 4]])).tolist() == [[pytest.approx(2.5), 0.5]]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(("size", "scale"), [(16, 1.0), (4096, 1.0), (4096, 256.0)])
    def test_a_step_of_adam_moves_values_by_at_most_twice_the_rate(
        self, size: int, scale: float, dtype: torch.dtype
    ) -> None:
        """Whatever the hidden size and the length of hidden states, which all point in much the same direction."""
        generator = torch.Generator().manual_seed(0)
        states = (scale * (1 + torch.randn((8, 4, size), generator=generator))).to(dtype)
        head = ValueHead(size, dtype)
        optimizer = torch.optim.Adam(head.parameters(), lr=0.125)
        (head(states) - 1).square().mean().backward()
        optimizer.step()
        values = head(states)
        assert values.min() > 0.125 and values.max() < 0.25 * 1.001

    def test_the_gradient_is_bounded_by_the_error(self) -> None:
        """That of 0.5 (V - R)² has a norm of at most |V - R| √(1 + 1/H); a state of zeros gives no NaN."""
        head, states = ValueHead(16), torch.cat([3e4 * torch.ones(1, 1, 16), torch.zeros(1, 1, 16)])
        states.requires_grad_()
        (0.5 * (head(states) - 2.0).square()).sum().backward()
        assert head.weight.grad is not None and head.bias.grad is not None and states.grad is not None
        assert head.weight.grad.norm().item() == pytest.approx(2 / 4)
        assert head.bias.grad.item() == pytest.approx(-4)
        assert states.grad.isfinite().all()

    def test_computes_in_float32(self) -> None:
        """1/256 is lost when bfloat16 numbers near 1 are added."""
        head = ValueHead(4, torch.bfloat16)
        head.weight.data.copy_(torch.tensor([[2.0, 2**-7, 0.0, 0.0]]))
        states = torch.ones((1, 1, 4), dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            values = head(states)
        assert values.dtype == torch.float32
        assert values.item() == 0.5 + 2**-9


@pytest.mark.parametrize("kind", KINDS)
class TestValues:
    def test_value_beside_a_token_is_that_of_the_state_before_it(self, kind: str) -> None:
        model, critic = policy_with(kind)
        inputs = batch()
        _, values = with_values(model, *inputs.values())
        expected = expected_values(model, critic, kind, inputs)
        kept = (inputs["attention_mask"][:, 1:] * inputs["attention_mask"][:, :-1]).bool()
        torch.testing.assert_close(values[kept], expected[:, :-1][kept], rtol=0, atol=1e-6)
        assert not values[~kept].any()
        assert expected.std() > 0.01

    def test_the_policy_says_what_it_says_without(self, kind: str) -> None:
        model, _ = policy_with(kind)
        inputs = batch()
        logps, _ = with_values(model, *inputs.values())
        without = model(**inputs, labels=inputs["input_ids"], fused_lm_head=True).log_probs
        kept = (inputs["attention_mask"][:, 1:] * inputs["attention_mask"][:, :-1]).bool()
        torch.testing.assert_close(logps[kept], without[kept])
        assert "logits" in model(**inputs)


def test_an_adapter_that_peft_has_frozen_is_trained_again() -> None:
    """Trap: PEFT sets `requires_grad` to False on the adapters that it switches away from."""
    model, _ = policy_with("adapter")
    with model.disable_adapter():
        pass
    with_values(model, *batch().values())[1].sum().backward()
    assert all(p.grad is not None for p in critic_parameters(model).values())


@pytest.mark.parametrize(
    ("max_norm", "policy", "critic"),
    [(1.0, [0.6, 0.8], [0.0, 1.0]), (6.0, [3.0, 4.0], [0.0, 6.0]), (13.0, [3.0, 4.0], [0.0, 12.0])],
)
def test_clipping_apart(max_norm: float, policy: list[float], critic: list[float]) -> None:
    """Norms of 5 and 12 by hand; of both together it would be 13."""
    model = nn.Module()
    model.critic, model.frozen = nn.Module(), nn.Parameter(torch.zeros(1), requires_grad=False)
    parameters = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    model.weight, model.critic.weight = parameters
    for parameter, gradient in zip(parameters, ([3.0, 4.0], [0.0, 12.0]), strict=True):
        parameter.grad = torch.tensor(gradient)
    norms = clip_apart(Accelerator(cpu=True), model, max_norm)
    assert [float(norm) for norm in norms] == [5.0, 12.0]
    for parameter, expected in zip(parameters, (policy, critic), strict=True):
        assert parameter.grad is not None
        assert parameter.grad.tolist() == pytest.approx(expected, rel=1e-5)
