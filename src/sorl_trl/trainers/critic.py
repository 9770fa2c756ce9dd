"""SO-PPO's critic V(s), of three kinds, computed in the policy's own forward pass.

A critic is a submodule of the causal language model, so one wrapped model (DDP, DeepSpeed, PEFT) holds both, and one
forward pass gives log-probabilities and values. This suits engines that expect one forward pass per step and all
losses from it. A policy without a critic computes and saves none of this.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, PeftType
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import FusedCausalLMOutput

CRITIC_ATTRIBUTE = "critic"
"""The name of the critic among the causal language model's submodules, and of its adapter among a layer's."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""LoRA initializations that change the base model's weights."""


class ValueHead(nn.Module):
    """V(s) = w · h / (√H ‖h‖₂) + b for a hidden state h of size H, in float32. w and b start at 0.

    We added the scaling: a step of Adam moves w and b by about the learning rate η, and thus a
    value by at most about 2η in any model, since ‖h‖₁ ≤ √H ‖h‖₂. Unscaled, values would move by η ‖h‖₁, which can
    exceed the returns.
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
    """Base class of the three kinds, which turn one call of the policy's backbone into V after each token, (B, L)."""

    kind: str

    def __init__(self, head: ValueHead) -> None:
        super().__init__()
        self.head = head

    def unfreeze(self) -> None:
        """Undo what PEFT does to `requires_grad` when it switches adapters; called before every training forward."""


class HeadCritic(Critic):
    """A scalar head on the policy's hidden states, whose loss does not train the policy's weights."""

    kind = "head"

    def forward(self, call: BackboneCall) -> Tensor:
        return self.head(call.output.last_hidden_state.detach())


class ModelCritic(Critic):
    """A separate value model: any Hugging Face backbone, and a head."""

    kind = "model"

    def __init__(self, head: ValueHead, backbone: PreTrainedModel) -> None:
        super().__init__(head)
        self.backbone = backbone

    def forward(self, call: BackboneCall) -> Tensor:
        return self.head(self.backbone(*call.args, **call.kwargs).last_hidden_state)


class AdapterCritic(Critic):
    """A second LoRA adapter, made by `add_critic_adapter`, and a scalar head, on the policy's frozen base model."""

    kind = "adapter"

    def __init__(self, head: ValueHead, model: PeftModel, config: LoraConfig) -> None:
        super().__init__(head)
        self.config = config
        # In lists, because as a submodule of the critic, the policy would be its own descendant.
        self._policy, self._parts = [model], [*model.modules()]

    def active(self) -> AbstractContextManager[None]:
        """Context in which the policy's layers use only this adapter; modules without it act as the base model's.

        PEFT's `set_adapter` freezes every adapter but the active one, but both need gradients in one step.
        """
        layers = [each for each in self._parts if isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper)]
        switch: dict[str, Any] = {
            "_active_adapter": lambda _: [CRITIC_ATTRIBUTE],
            "_disable_adapters": lambda _: False,
        }
        return within_and_recomputed(self._parts, lambda: replaced(layers, **switch))

    def unfreeze(self) -> None:
        for name, parameter in self._policy[0].named_parameters():  # looked up each time, because FSDP replaces them
            if is_critic_name(name):
                parameter.requires_grad_(True)

    def forward(self, call: BackboneCall) -> Tensor:
        with self.active():
            hidden_states = call.backbone(*call.args, **call.kwargs).last_hidden_state
        return self.head(hidden_states)


def add_critic_adapter(model: PeftModel) -> LoraConfig:
    """Add an untrained LoRA adapter of the policy adapter's shape, without changing what else is trained.

    The layers have the adapter, but PEFT's list of adapters does not, so that saving, loading or listing adapters
    involves only the policy's.

    Raises:
        ValueError: The policy's adapter is not LoRA, trains biases, or changes the base model's weights.
    """
    config: Any = copy.deepcopy(model.peft_config[model.active_adapter])
    reason = ""
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:  # AdaLoRA's is one
        reason = f"it is a {type(config).__name__}, not LoRA"
    elif config.bias != "none" or str(config.init_lora_weights).startswith(_CHANGE_THE_BASE):
        given = f"`bias={config.bias!r}` with `init_lora_weights={config.init_lora_weights!r}`"
        reason = f"{given} changes the base model, which both share"
    if reason:
        raise ValueError(
            f"`critic='adapter'` adds a second adapter like the policy's, but {reason}. Use `critic='head'` or "
            "`critic='model'`, or plain LoRA with `bias='none'`."
        )
    config.inference_mode = False
    config.modules_to_save = None  # the policy's adapter trains these
    if not isinstance(config.init_lora_weights, bool):
        config.init_lora_weights = True
    dtype = trained_dtype(model)
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    model.add_adapter(CRITIC_ATTRIBUTE, config)
    del model.peft_config[CRITIC_ATTRIBUTE]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained.get(name, True))
        if is_critic_name(name) and "lora_magnitude_vector" not in name:  # DoRA's needs more than bfloat16
            parameter.data = parameter.data.to(dtype)
    return config


def trained_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the trained parameters. The critic shares it, because ZeRO-3 gathers them together."""
    return next(p.dtype for p in model.parameters() if p.requires_grad)


def known_adapter(model: PeftModel, config: LoraConfig) -> AbstractContextManager[None]:
    """Context in which PEFT knows the critic's adapter and can collect and set its weights."""
    return replaced([model], peft_config=lambda known: {**known, CRITIC_ATTRIBUTE: config})


@dataclass
class CausalLMOutputWithCritic(FusedCausalLMOutput):
    """`FusedCausalLMOutput` with the critic's values."""

    critic_values: Tensor | None = None
    """(1, M), parallel to `log_probs`: V of the state in which the token was chosen."""


def causal_lm_of(model: nn.Module) -> PreTrainedModel:
    """The causal language model under PEFT's wrapper, or `model` itself."""
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def is_critic_name(name: str) -> bool:
    """Whether the name of a parameter or state-dict entry belongs to the critic, under any wrappers."""
    return CRITIC_ATTRIBUTE in name.split(".")


@contextmanager
def detached_critic(model: nn.Module) -> Iterator[None]:
    """Context in which the policy has no critic, so that it can be loaded or paired with another model."""
    causal_lm = causal_lm_of(model)
    critic = causal_lm._modules.pop(CRITIC_ATTRIBUTE, None)
    try:
        yield
    finally:
        if critic is not None:
            causal_lm.add_module(CRITIC_ATTRIBUTE, critic)


class FollowPolicy(SyncRefModelCallback):
    """A `SyncRefModelCallback` for a policy with a critic: parameters are paired, and the reference has no critic."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with detached_critic(self.accelerator.unwrap_model(kwargs["model"])):
            super().on_step_end(args, state, control, **kwargs)


@contextmanager
def within_and_recomputed(modules: Iterable[Any], context: Callable[[], Any]) -> Iterator[None]:
    """Enter a context made by `contextmanager`; gradient checkpointing enters it again when it recomputes.

    Backward runs outside the context, where reentrant checkpointing would silently compute the wrong gradients.
    """

    def entering(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        return lambda function, *args, **options: checkpoint(context()(function), *args, **options)

    checkpointed = [each for each in modules if getattr(each, "gradient_checkpointing", False)]
    with context(), replaced(checkpointed, _gradient_checkpointing_func=entering):
        yield


@contextmanager
def replaced(holders: Sequence[Any], **new: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which the named attributes of each holder are replaced by what the functions make of them."""
    before = [(holder, name, getattr(holder, name)) for holder in holders for name in new]
    for holder, name, value in before:
        setattr(holder, name, new[name](value))
    try:
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)
