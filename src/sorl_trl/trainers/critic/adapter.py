"""The critic as a second LoRA adapter on the policy's frozen base model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from peft import LoraConfig, PeftModel, PeftType
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from sorl_trl.trainers.critic.model import BackboneCall, Critic, ValueHead, is_critic_name

CRITIC_ADAPTER = "critic"
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""LoRA initializations that change the base model's weights."""


class AdapterCritic(Critic):
    """A LoRA adapter "critic" and a scalar head: one base model serves policy, reference and critic.

    `config` is the result of `add_critic_adapter(model)`.
    """

    kind = "adapter"

    def __init__(self, head: ValueHead, model: PeftModel, config: LoraConfig) -> None:
        super().__init__(head)
        self.config = config
        # A list, because as a submodule of the critic, the policy would be its own descendant.
        self._layers = [m for m in model.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]

    def unfreeze(self) -> None:
        for layer in self._layers:
            for name, parameter in layer.named_parameters():  # looked up each time, because FSDP replaces them
                if is_critic_name(name):
                    parameter.requires_grad_(True)

    def forward(self, call: BackboneCall) -> Tensor:
        with self.active(), self._checkpoints_bound(call.backbone):
            hidden_states = call.backbone(*call.args, **call.kwargs).last_hidden_state
        return self.head(hidden_states)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, forward passes use the critic's adapter alone; modules without it are the base model's.

        It does what PEFT's `set_adapter` does, but leaves `requires_grad` alone: PEFT freezes every adapter but the
        active one, and two that train in one forward pass need both.
        """
        before = [(layer._active_adapter, layer._disable_adapters) for layer in self._layers]
        for layer in self._layers:
            layer._active_adapter, layer._disable_adapters = [CRITIC_ADAPTER], False
        try:
            yield
        finally:
            for layer, (active, disabled) in zip(self._layers, before, strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled

    @contextmanager
    def _checkpoints_bound(self, backbone: nn.Module) -> Iterator[None]:
        """Within it, every checkpointed call of a layer is also recomputed with the critic's adapter.

        Gradient checkpointing recomputes layers during backward, when the policy's adapter is active again.
        """
        layers: list[Any] = [m for m in backbone.modules() if getattr(m, "gradient_checkpointing", False)]
        before = [layer._gradient_checkpointing_func for layer in layers]
        for layer, checkpoint in zip(layers, before, strict=True):
            layer._gradient_checkpointing_func = self._bound(checkpoint)
        try:
            yield
        finally:
            for layer, checkpoint in zip(layers, before, strict=True):
                layer._gradient_checkpointing_func = checkpoint

    def _bound(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def bound_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def with_critic_adapter(*inputs: Any, **options: Any) -> Any:
                with self.active():
                    return function(*inputs, **options)

            return checkpoint(with_critic_adapter, *args, **kwargs)

        return bound_checkpoint


def check_fsdp(critic: Critic, activation_checkpointing: bool) -> None:
    """Raise ValueError if FSDP would recompute layers with the policy's adapter instead of the critic's."""
    if activation_checkpointing and isinstance(critic, AdapterCritic):
        raise ValueError(
            "`critic` is 'adapter', which FSDP's `fsdp_activation_checkpointing` does not support: set it to "
            "False, and `gradient_checkpointing` to True."
        )


def add_critic_adapter(model: PeftModel) -> LoraConfig:
    """Add an untrained LoRA adapter "critic" of the policy adapter's shape, without changing what is trained.

    The layers have the adapter, but PEFT's list of adapters does not, so that saving, loading or listing adapters
    involves only the policy's.

    Raises:
        ValueError: The policy's adapter is not LoRA, trains biases, or changes the base model's weights.
    """
    policy_config = model.peft_config[model.active_adapter]
    if not isinstance(policy_config, LoraConfig) or policy_config.peft_type != PeftType.LORA:  # AdaLoRA's is one
        raise ValueError(
            f"`critic='adapter'` copies the policy's LoRA configuration, but its adapter is a "
            f"{type(policy_config).__name__}. Use `critic='head'` or `critic='model'`."
        )
    if policy_config.bias != "none":
        raise ValueError(
            f"`bias={policy_config.bias!r}` trains biases of the base model, which `critic='adapter'` would share. "
            "Use `critic='head'` or `critic='model'`, or `bias='none'`."
        )
    if str(policy_config.init_lora_weights).startswith(_CHANGE_THE_BASE):
        raise ValueError(
            f"`init_lora_weights={policy_config.init_lora_weights!r}` subtracts the policy's first adapter from the "
            "base model, which `critic='adapter'` would share. Use `critic='head'` or `critic='model'`, or plain LoRA."
        )
    config = copy.deepcopy(policy_config)
    config.inference_mode = False
    config.modules_to_save = None  # the policy's adapter trains these
    if not isinstance(config.init_lora_weights, bool):
        config.init_lora_weights = True
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    model.add_adapter(CRITIC_ADAPTER, config)
    del model.peft_config[CRITIC_ADAPTER]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained.get(name, True))
    return config


@contextmanager
def known_adapter(model: PeftModel, config: LoraConfig) -> Iterator[None]:
    """Within it, PEFT knows the critic's adapter and can collect and set its weights."""
    model.peft_config[CRITIC_ADAPTER] = config
    try:
        yield
    finally:
        model.peft_config.pop(CRITIC_ADAPTER, None)
