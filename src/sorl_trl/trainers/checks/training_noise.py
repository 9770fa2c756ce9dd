"""Dropout and other noise of training mode: found in a model, and switched off.

The old policy's log-probabilities and the policy's come from two forward passes in training mode. With dropout they
differ by noise, and importance ratios, clipping and the KL to the old policy measure that noise.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import nn

_DROP = re.compile("drop", re.IGNORECASE)
"""In the name of a class or of an attribute: dropout, `attn_pdrop`, `layerdrop`, `DropPath`."""
_JITTER_NAMES = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")
"""How mixtures of experts of transformers call noise on a router's input, which they add in training mode alone.
Phi-MoE's `router_jitter_noise` is none: its router reads it in evaluation too."""
_CONFIG_READ = re.compile(r"self\.config\.(\w*drop\w*)", re.IGNORECASE)
_OF_OTHER_HEADS = ("classifier", "summary")
"""Dropout of a configuration that acts in heads which a policy does not have."""


def disable_noise(model: nn.Module) -> None:
    """Set every dropout probability to 0, on whatever module and in whatever form it stands.

    TRL's `disable_dropout_in_model` sets those of `nn.Dropout`. Attention layers hold theirs as a float, and some of
    PEFT's layers in a dictionary. The model's configuration, which is saved with it, stays as it is.
    """
    for module, name, key, _ in _probabilities(model):
        if key is None:
            setattr(module, name, 0.0)
        else:
            getattr(module, name)[key] = 0.0


def noise_in(model: nn.Module) -> list[str]:
    """The noise that `model` would add in training mode, as `name=value (where)`, each kind once."""
    found: dict[str, list[str]] = {}
    names = {module: path for path, module in model.named_modules()}
    for module, name, _, value in _probabilities(model):
        path = names[module]  # a module of its own is called as its parent calls it
        label = _without_indices(path) if _DROP.search(type(module).__name__) else name
        found.setdefault(f"{label}={value:g}", []).append(path)
    for module, name, value in _config_reads(model):
        found.setdefault(f"config.{name}={value:g}", []).append(names[module])
    return [f"{label} ({_where(paths)})" for label, paths in found.items()]


def noise_in_config(config: Any) -> dict[str, float]:
    """Name -> probability of the dropout that a model's configuration asks for."""
    return {
        name: float(value)
        for name, value in vars(config).items()
        if (_DROP.search(name) or name.endswith(_JITTER_NAMES))
        and not name.startswith(_OF_OTHER_HEADS)
        and _is_probability(value)
    }


def noise_in_arguments(config: Any) -> list[str]:
    """The noise that the trainer's own arguments ask for, in the form of `noise_in`."""
    alpha = config.neftune_noise_alpha
    return [f"neftune_noise_alpha={alpha:g} (the embeddings)"] if alpha else []


def noise_warning(noise: list[str], is_disabled: bool) -> str:
    """What `noise`, which is still there, does to training, and what to do about it.

    Args:
        noise: as `noise_in` returns it, or other kinds in its form.
        is_disabled: whether `disable_dropout` is set, so that this is what it does not reach.
    """
    advice = (
        "`disable_dropout` does not reach it: take it out of the model's configuration, for instance with "
        "`model_init_kwargs={'attention_dropout': 0.0}`, or out of the arguments."
        if is_disabled
        else "Set `disable_dropout=True`, which is the default."
    )
    return (
        f"The policy is trained with noise: {', '.join(noise)}. Policy and old policy then differ without any update: "
        "importance ratios, clip fractions and the KL to the old policy measure that noise too, and tokens are "
        f"clipped for nothing. {advice}"
    )


def _probabilities(model: nn.Module) -> Iterator[tuple[nn.Module, str, str | None, float]]:
    """Module, attribute, key of a dictionary (else None) and value of each probability above 0."""
    for module in model.modules():
        is_dropout = bool(_DROP.search(type(module).__name__))
        for name, value in vars(module).items():
            if not (_DROP.search(name) or name in _JITTER_NAMES or (is_dropout and name == "p")):
                continue
            if _is_probability(value):
                yield module, name, None, float(value)
            elif isinstance(value, dict):  # PEFT's: by the names of the adapters
                entries = [(key, each) for key, each in value.items() if _is_probability(each)]
                yield from ((module, name, key, float(each)) for key, each in entries)


def _config_reads(model: nn.Module) -> Iterator[tuple[nn.Module, str, float]]:
    """Dropout that a module's `forward` reads from the configuration, at every call anew."""
    read_by: dict[type, set[str]] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in read_by:
            read_by[kind] = _reads_of(kind) if hasattr(module, "config") else set()
        for name in sorted(read_by[kind]):
            if _is_probability(value := getattr(getattr(module, "config", None), name, None)):
                yield module, name, float(value)


def _reads_of(kind: type[nn.Module]) -> set[str]:
    try:
        return set(_CONFIG_READ.findall(inspect.getsource(kind.forward)))
    except (OSError, TypeError):  # no source: compiled, or written in a prompt
        return set()


def _is_probability(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


def _without_indices(path: str) -> str:
    """`layers.3.mlp.lora_dropout.default` -> `lora_dropout.default`: what is alike in all layers."""
    parts = [part for part in path.split(".") if not part.isdigit()]
    first = next((i for i, part in enumerate(parts) if _DROP.search(part)), len(parts) - 1)
    return ".".join(parts[first:])


def _where(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{len(paths)} modules, the first {paths[0]}"
