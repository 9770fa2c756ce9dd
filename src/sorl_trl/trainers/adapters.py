"""Several of PEFT's adapters that are trained together: which one a pass uses, and which may stand beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peft import LoraConfig, PeftType
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""LoRA initializations that change the base model's weights."""


class Adapters:
    """Switches between the adapters of a PEFT model, without changing what is trained.

    PEFT's `set_adapter` freezes every adapter but the active one, and several that train in one step need gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        self.layers: list[Any] = [
            each for each in modules if isinstance(each, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        ]
        self._may_checkpoint = [each for each in modules if hasattr(each, "gradient_checkpointing")]

    @contextmanager
    def active(self, name: str) -> Iterator[None]:
        """Within it, passes use this adapter alone; modules without it are the base model's.

        Gradient checkpointing computes layers again during backward, when another adapter may be active: what it
        computes again uses this one, too.
        """

        def under_it(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
            return lambda function, *args, **kwargs: checkpoint(self._switched(name)(function), *args, **kwargs)

        checkpointed = [each for each in self._may_checkpoint if each.gradient_checkpointing]
        with self._switched(name), replaced(checkpointed, _gradient_checkpointing_func=under_it):
            yield

    @property
    def are_off(self) -> bool:
        """Whether PEFT has switched all of them off, as it does for the reference policy."""
        return bool(self.layers[0].disable_adapters)

    def _switched(self, name: str) -> Any:
        return replaced(self.layers, _active_adapter=lambda _: [name], _disable_adapters=lambda _: False)


@contextmanager
def replaced(holders: Sequence[Any], **new: Callable[[Any], Any]) -> Iterator[None]:
    """Within it, the named attributes of each holder are what the functions make of them."""
    before = [(holder, name, getattr(holder, name)) for holder in holders for name in new]
    for holder, name, value in before:
        setattr(holder, name, new[name](value))
    try:
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def why_not_beside_others(config: Any) -> str | None:
    """What keeps an adapter from standing beside others on one base model; None if nothing does."""
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:  # AdaLoRA's is one
        return f"it is a {type(config).__name__}, and not LoRA"
    if config.bias != "none":
        return f"`bias={config.bias!r}` trains biases of the base model, which all adapters share"
    if str(config.init_lora_weights).startswith(_CHANGE_THE_BASE):
        return (
            f"`init_lora_weights={config.init_lora_weights!r}` subtracts the first adapter from the base model, which "
            "all adapters share"
        )
    return None
