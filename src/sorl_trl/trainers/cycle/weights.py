"""Loads checkpoints whose weights have other names than in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel


def load_renamed(model: Any, checkpoint: Path) -> bool:
    """Load the weights of `checkpoint` if it names any that `model` has not, and return whether it did.

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
