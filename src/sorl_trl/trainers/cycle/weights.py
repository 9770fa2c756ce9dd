"""Loads checkpoints whose weights have other names or dtypes than in the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel


def load_weights(trainer: Any, checkpoint: str, load: Callable[[], None]) -> None:
    """Load the weights of a checkpoint into the trainer's policy, with transformers' `load` if that gets them right.

    Engines that shard parameters load their own checkpoints. PEFT would load an adapter of bfloat16 in float32, so
    parameters keep their dtypes.
    """
    policy = trainer.model
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        load()
    elif not load_renamed(policy, Path(checkpoint)):
        before = {name: parameter.dtype for name, parameter in policy.named_parameters()}
        load()
        for name, parameter in policy.named_parameters():
            parameter.data = parameter.data.to(before.get(name, parameter.dtype))


def load_renamed(model: Any, checkpoint: Path) -> bool:
    """Load the weights of `checkpoint` if some have names that `model` lacks, and return whether it did.

    transformers saves mixtures of experts and many vision-language models under other names, and with other shapes,
    than they have in memory. `from_pretrained` converts them; transformers' `Trainer` does not, and would go on with
    the weights that the model began with.
    """
    if not isinstance(model, PreTrainedModel) or saved_names(checkpoint) <= {*model.state_dict()}:
        return False
    saved = type(model).from_pretrained(checkpoint, dtype=model.dtype)
    model.load_state_dict(saved.state_dict())
    return True


def saved_names(checkpoint: Path) -> set[str]:
    """The names of the weights in a checkpoint of safetensors files."""
    names = set[str]()
    for path in checkpoint.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= {*file.keys()}
    return names
