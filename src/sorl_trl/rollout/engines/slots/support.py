"""Decides by class, config and trial whether slots reproduce a model exactly, with the reason if they do not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from sorl_trl.rollout.engines.slots.cache import Forward, SlotCache

IN_SEGMENTS = "sorl_segments"
"""The name of the attention that trainers set (`trainers/layouts.py`); it is sdpa in a pass of the slots."""
_ATTENTION = ("eager", "sdpa", IN_SEGMENTS)
# Other kinds recompute frequencies from the longest row of a batch, which cached keys would not match.
_ROTARY = ("default", "linear", "llama3", "yarn")
_GENERATION_METHODS = ("generate", "prepare_inputs_for_generation", "_sample", "_get_logits_processor")
# Options that slots serve, that the engine sets, or that do not affect which token comes next.
_SERVED_OPTIONS = {
    *("do_sample", "temperature", "top_k", "top_p", "min_p"),
    *("max_length", "max_new_tokens", "bos_token_id", "eos_token_id", "pad_token_id", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
    *("compile_config", "disable_compile", "continuous_batching_config", "transformers_version"),
}
_CACHES = (None, "dynamic", "hybrid")  # a dynamic cache holds what ours does; "hybrid" is treated as one

_IDS = (0, 1, 2, 1)
_TOLERANCE = 0.05  # of the largest logit: rounding in half precision changes less, a wrong mask more


class NotServed(ValueError):
    """The slot engine would not compute what `model.generate` does; the message gives the reason."""


def base_model(model: Any) -> PreTrainedModel:
    """Find the transformers model under adapters. Raises NotServed if there is none, or an adapter adds tokens."""
    peft_config = getattr(model, "active_peft_config", None) if hasattr(model, "get_base_model") else None
    if peft_config is not None:
        if peft_config.is_prompt_learning:
            raise NotServed(f"the adapter ({type(peft_config).__name__}) puts virtual tokens in front of the context")
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise NotServed(f"{type(model).__name__} is not a `PreTrainedModel`")
    return model


def check_model(base: PreTrainedModel) -> None:
    """Raise NotServed if a model's class or config shows that slots would be wrong."""
    name, config = type(base).__name__, base.config.get_text_config(decoder=True)
    if base.config.is_encoder_decoder:
        raise NotServed(f"{name} has an encoder")
    if is_bidirectional(base):
        raise NotServed(f"{name} is bidirectional")
    for method in _GENERATION_METHODS:
        if getattr(type(base), method, None) is not getattr(GenerationMixin, method) or method in vars(base):
            raise NotServed(f"{name} overrides `{method}`")
    if config._attn_implementation not in _ATTENTION:
        raise NotServed(f"attn_implementation={config._attn_implementation!r} must be one of {', '.join(_ATTENTION)}")
    if len(set(getattr(base, "hf_device_map", {}).values())) > 1:
        raise NotServed(f"{name} is spread over several devices")
    if base.training and base.is_gradient_checkpointing:
        raise NotServed(f"gradient checkpointing is on, which disables the cache of {name}")
    _check_layers(config)
    _check_positions(config)


def _check_layers(config: Any) -> None:
    """Check the cache that `generate` would build: its layers for windows, chunks and states have other classes."""
    others = sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers} - {DynamicLayer.__name__})
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo's, which that cache ignores
        others.append("local attention")
    if others:
        raise NotServed(f"it has layers that do not attend to the whole context ({', '.join(others)})")


def _check_positions(config: Any) -> None:
    if (kind := rope_of_batch(config)) is not None:
        raise NotServed(f"its rotary positions ({kind}) depend on the longest context of a batch")
    if any("mrope_section" in parameters for parameters in _rotary(config)):
        raise NotServed("its positions have several dimensions")


def is_bidirectional(model: PreTrainedModel) -> bool:
    """Whether tokens attend to later ones, as in BERT and its kin unless `config.is_decoder` is True.

    That is read from layers, because GPT-NeoX's config says False, too, and no layer asks it. A vision-language model
    may have such layers for its images.
    """
    config = model.config.get_text_config(decoder=True)
    layers = model.modules() if config is model.config else ()
    return not getattr(config, "is_causal", True) or any(getattr(each, "is_decoder", True) is False for each in layers)


def rope_of_batch(config: Any) -> str | None:
    """The kind of rotary positions, if they depend on the longest row of a batch; otherwise None."""
    kinds = (parameters.get("rope_type", "default") for parameters in _rotary(config))
    return next((kind for kind in kinds if kind not in _ROTARY), None)


def _rotary(config: Any) -> list[dict[str, Any]]:
    """The rotary parameters of a config: one set for all layers, or one per kind of layer."""
    rotary = getattr(config, "rope_parameters", None) or {}
    return [rotary, *(each for each in rotary.values() if isinstance(each, dict))]


def resolved(generation_config: GenerationConfig, model: PreTrainedModel) -> GenerationConfig:
    """The config as `generate` reads it: None means `model.generation_config`'s value, and then the global default."""
    config: Any = copy.deepcopy(generation_config)
    config.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    filled: GenerationConfig = config
    return filled


def check_generation_config(generation_config: GenerationConfig, model: Any) -> GenerationConfig:
    """Return the config as `generate` would read it. Raises NotServed for an option that slots do not support."""
    config, defaults = resolved(generation_config, model), GenerationConfig._get_default_generation_params()
    for name, value in vars(config).items():
        known = name.startswith("_") or name in _SERVED_OPTIONS or value in (None, defaults.get(name))
        if not known and not (name == "cache_implementation" and value in _CACHES):
            raise NotServed(f"generation_config.{name}={value!r} needs `model.generate`")
    return config


def check_served(model: Any, generation_config: GenerationConfig) -> None:
    """Raise NotServed if slots do not support the model in eval mode."""
    with _in_eval_mode(model):
        base = base_model(model)
        check_model(base)
        check_generation_config(generation_config, model)
        bytes_per_token(model, base)


def bytes_per_token(model: Any, base: PreTrainedModel) -> int:
    """Measure how many bytes a token takes in the cache.

    Takes four short forward passes: one reads a few tokens at once, three read them in a slot, beside a longer row.
    Raises NotServed if the logits disagree, or the model fails or does not use the cache.
    """
    ids = [each % base.config.get_text_config().vocab_size for each in _IDS]
    cache = SlotCache(2, len(ids))
    with torch.no_grad(), _in_eval_mode(model):
        try:
            plain = model(input_ids=torch.tensor([ids], device=base.device), use_cache=False).logits[0, -1].float()
            logits = _in_slots(Forward(model, base), cache, ids)
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise NotServed(f"{type(base).__name__} failed with a slot cache ({error})") from error
    if not cache.bytes_per_token:
        raise NotServed(f"{type(base).__name__} does not use the cache that it is given")
    off = (logits - plain).abs().max()
    if plain.isfinite().all() and not off <= _TOLERANCE * plain.abs().max():
        raise NotServed(f"{type(base).__name__} computes different logits with slots (off by {off:.2g})")
    return cache.bytes_per_token


def _in_slots(forward: Forward, cache: SlotCache, ids: list[int]) -> torch.Tensor:
    """The logits after `ids` in slot 0, read in three parts. The first is padded, because slot 1 gets more tokens."""
    forward(cache, [0, 1], [ids[:-2], ids[:-1]], [0, 0])
    forward(cache, [0], [ids[-2:-1]], [len(ids) - 2])
    return forward(cache, [1, 0], [ids[-1:]] * 2, [len(ids) - 1] * 2)[1].float()


@contextmanager
def _in_eval_mode(model: Any) -> Iterator[None]:
    """Switch dropout off, and restore every module's mode afterwards. Random generators do not advance."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
