"""The critic V(s) of SO-PPO inside the policy's own forward pass.

A critic is a submodule of the causal language model, so one wrapped model (DDP, DeepSpeed, PEFT) holds both, and one
forward pass gives log-probabilities and values. Engines that rely on one forward pass per step, from which all losses
come, find what they expect. The policy alone neither computes nor saves any of it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import FusedCausalLMOutput

CRITIC_ATTRIBUTE = "critic"
"""The name of the critic among the causal language model's submodules."""


class ValueHead(nn.Module):
    """V(s) = w · h / (√H ‖h‖₂) + b for a hidden state h of size H, in float32. w and b are 0 at first.

    The scaling is ours. A step of Adam moves w and b by about the learning rate η, and thus a value by at most about
    2η in any model, since ‖h‖₁ ≤ √H ‖h‖₂. Unscaled, values would move by η ‖h‖₁, which can exceed the returns.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, L, H) to (B, L)."""
        hidden_states = hidden_states.to(self.weight.device)  # a model split over devices may end on another one
        with torch.autocast(hidden_states.device.type, enabled=False):
            scaled = nn.functional.normalize(hidden_states.float(), dim=-1) / hidden_states.size(-1) ** 0.5
            values = nn.functional.linear(scaled, self.weight.float(), self.bias.float())
        return values.squeeze(-1)


@dataclass
class BackboneCall:
    """The arguments of a call of the policy's backbone, and its output."""

    backbone: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class Critic(nn.Module):
    """Base of the three kinds, which turn one call of the policy's backbone into V after each token, (B, L)."""

    kind: str

    def __init__(self, head: ValueHead) -> None:
        super().__init__()
        self.head = head

    def unfreeze(self) -> None:
        """Undo what PEFT does to `requires_grad` when it switches adapters; called before every training forward."""


class HeadCritic(Critic):
    """A scalar head on the policy's hidden states. With `trunk_gradient`, its loss trains the policy's weights too."""

    kind = "head"

    def __init__(self, head: ValueHead, trunk_gradient: bool = False) -> None:
        super().__init__(head)
        self.trunk_gradient = trunk_gradient

    def forward(self, call: BackboneCall) -> Tensor:
        hidden_states = call.output.last_hidden_state
        return self.head(hidden_states if self.trunk_gradient else hidden_states.detach())


class ModelCritic(Critic):
    """A separate value model: any Hugging Face backbone, and a head."""

    kind = "model"

    def __init__(self, head: ValueHead, backbone: PreTrainedModel) -> None:
        super().__init__(head)
        self.backbone = backbone

    def forward(self, call: BackboneCall) -> Tensor:
        output = self.backbone(
            input_ids=call.kwargs.get("input_ids", call.args[0] if call.args else None),
            attention_mask=call.kwargs.get("attention_mask"),
            use_cache=False,
        )
        return self.head(output.last_hidden_state)


@dataclass
class CausalLMOutputWithCritic(FusedCausalLMOutput):
    """`FusedCausalLMOutput` with the critic's values, (B, L - 1), the last of which are aligned with `log_probs`.

    The value beside a token's log-probability is V of the state in which that token was chosen.
    """

    critic_values: Tensor | None = None


def attach_critic(causal_lm: PreTrainedModel, critic: Critic) -> None:
    """Make `critic` a submodule of `causal_lm`, whose forward returns values with `with_values=True`.

    Call it after `trl.trainer.utils.add_fused_lm_head`. Like that, it replaces the model's `forward`, because PEFT
    calls `forward` directly, past the module's hooks, and engines want the values in the output.
    """
    bound: Any = causal_lm.forward
    policy_forward = bound.__func__  # unbound, so that a copy of the model does not run this model's

    @functools.wraps(policy_forward)  # `generate` validates its arguments against the signature
    def forward(self: PreTrainedModel, *args: Any, with_values: bool = False, **kwargs: Any) -> Any:
        if not with_values:
            return policy_forward(self, *args, **kwargs)
        critic: Critic = getattr(self, CRITIC_ATTRIBUTE)
        critic.unfreeze()
        calls: list[BackboneCall] = []
        # The backbone is looked up on each call, since FSDP and PEFT replace it after attaching.
        # The hook runs before all others, which may cut the output down to what the policy's head reads.
        with self.base_model.register_forward_hook(
            lambda *call: calls.append(BackboneCall(*call)), prepend=True, with_kwargs=True
        ):
            output = policy_forward(self, *args, **kwargs)
        values = critic(calls[-1])
        return CausalLMOutputWithCritic(**output, critic_values=values[:, :-1])

    causal_lm.add_module(CRITIC_ATTRIBUTE, critic)
    causal_lm.forward = types.MethodType(forward, causal_lm)


def causal_lm_of(model: nn.Module) -> PreTrainedModel:
    """The causal language model under PEFT's wrapper, or `model` itself."""
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def is_critic_name(name: str) -> bool:
    """Whether the name of a parameter or state-dict entry belongs to the critic, under any wrappers."""
    return CRITIC_ATTRIBUTE in name.split(".")


@contextmanager
def detached_critic(model: nn.Module) -> Iterator[None]:
    """Within it, the policy has no critic, so that it can be loaded or paired with another model."""
    causal_lm = causal_lm_of(model)
    critic = causal_lm._modules.pop(CRITIC_ATTRIBUTE, None)
    try:
        yield
    finally:
        if critic is not None:
            causal_lm.add_module(CRITIC_ATTRIBUTE, critic)


class FollowPolicy(SyncRefModelCallback):
    """A `SyncRefModelCallback` for a policy with a critic: it pairs parameters, and the reference has no critic."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with detached_critic(self.accelerator.unwrap_model(kwargs["model"])):
            super().on_step_end(args, state, control, **kwargs)


class ValuesBesideLogps:
    """Wraps a model for `GRPOTrainer._get_per_token_logps_and_entropies`, which only calls it, to compute values."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self._chunks: list[CausalLMOutputWithCritic] = []
        """Outputs, not values, because the caller may still pad the values in them."""

    def __call__(self, **kwargs: Any) -> Any:
        output = self._model(**kwargs, with_values=True)
        self._chunks.append(output)
        return output

    @property
    def was_called(self) -> bool:
        return bool(self._chunks)

    def values(self, length: int) -> Tensor:
        """(B, length): V of the state before each of the last `length` tokens."""
        return torch.cat([cast(Tensor, chunk.critic_values)[:, -length:] for chunk in self._chunks])
