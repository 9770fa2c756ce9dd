"""Several of PEFT's adapters that are trained together: which one a pass uses, and which may stand beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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
        self._modules = [*model.modules()]
        self.layers: list[Any] = [
            each for each in self._modules if isinstance(each, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        ]

    @contextmanager
    def active(self, name: str) -> Iterator[None]:
        """Within it, passes use this adapter alone; modules without it are the base model's.

        What backward recomputes uses it, too.
        """
        with within_and_recomputed(self._modules, lambda: self._switched(name)):
            yield

    @property
    def are_off(self) -> bool:
        """Whether PEFT has switched all of them off, as it does for the reference policy."""
        return bool(self.layers[0].disable_adapters)

    def _switched(self, name: str) -> AbstractContextManager[None]:
        return replaced(self.layers, _active_adapter=lambda _: [name], _disable_adapters=lambda _: False)


@contextmanager
def within_and_recomputed(
    modules: Iterable[Any], context: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Enter a context, and have gradient checkpointing enter it again for each layer that backward recomputes.

    Backward runs outside of it. Reentrant checkpointing would compute the gradients of another function, and say
    nothing.
    """

    def entering(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def within(function: Callable[..., Any], *args: Any) -> Any:
            with context():
                return function(*args)

        return lambda function, *args, **options: checkpoint(partial(within, function), *args, **options)

    checkpointed = [each for each in modules if getattr(each, "gradient_checkpointing", False)]
    with context(), replaced(checkpointed, _gradient_checkpointing_func=entering):
        yield


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
