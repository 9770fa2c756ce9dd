"""Several PEFT adapters trained together: which one a pass uses, and which may share a base model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peft import LoraConfig, PeftType
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""LoRA initializations that change the base model's weights."""


@contextmanager
def adapter_alone(modules: Sequence[Any], name: str) -> Iterator[None]:
    """Context in which the modules of a PEFT model use only this adapter; modules without it act as the base model's.

    PEFT's `set_adapter` freezes every adapter but the active one, but adapters that train in one step all need
    gradients.
    """
    layers = [each for each in modules if isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    switch: dict[str, Any] = {"_active_adapter": lambda _: [name], "_disable_adapters": lambda _: False}
    with within_and_recomputed(modules, lambda: replaced(layers, **switch)):
        yield


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


def why_not_beside_others(config: Any) -> str | None:
    """Why an adapter cannot share a base model with others; None if it can."""
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:  # AdaLoRA's is one
        return f"it is a {type(config).__name__}, not LoRA"
    if config.bias != "none" or str(config.init_lora_weights).startswith(_CHANGE_THE_BASE):
        given = f"`bias={config.bias!r}` with `init_lora_weights={config.init_lora_weights!r}`"
        return f"{given} changes the base model, which all adapters share"
    return None
