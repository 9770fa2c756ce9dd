"""Building the critic that a configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModel, PreTrainedModel

from sorl_trl.checks import raise_first
from sorl_trl.trainers.checks.training_noise import disable_noise
from sorl_trl.trainers.config_rules import adapter_problems
from sorl_trl.trainers.critic.adapter import AdapterCritic, add_critic_adapter
from sorl_trl.trainers.critic.checkpoint import BACKBONE_FOLDER, CONFIG_FILE, critic_folder, restore_critic
from sorl_trl.trainers.critic.model import Critic, HeadCritic, ModelCritic, ValueHead, attach_critic, is_critic_name
from sorl_trl.trainers.so_ppo_config import SOPPOConfig


def causal_lm_of(model: nn.Module) -> PreTrainedModel:
    """The causal language model under PEFT's wrapper, or `model` itself."""
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def setup_critic(model: Any, config: SOPPOConfig, vocabulary: int) -> Critic:
    """Build the critic, attach it to `model`, and load what `critic_model_name_or_path` names.

    It is the same on every rank, and independent of what was sampled before.

    Args:
        model: the policy, under PEFT or not.
        config: the trainer's.
        vocabulary: how many tokens the tokenizer knows.

    Raises:
        ValueError: the configuration does not fit `model`.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("No parameter of the policy is trained. Load a PEFT model with `is_trainable=True`.")
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(config.seed)
        critic = _build(model, config, vocabulary)
    attach_critic(causal_lm_of(model), critic.to(model.device))
    if config.disable_dropout:
        disable_noise(model)
    saved = _saved_critic(config)
    if saved is not None:
        restore_critic(critic, model, saved)
    return critic


def _saved_critic(config: SOPPOConfig) -> Path | None:
    """The folder of a critic that `critic_model_name_or_path` names, as itself or by its checkpoint."""
    path = config.critic_model_name_or_path
    folder = None if path is None else critic_folder(path)
    return folder if folder is not None and (folder / CONFIG_FILE).is_file() else None


def _build(model: Any, config: SOPPOConfig, vocabulary: int) -> Critic:
    raise_first(adapter_problems(config, isinstance(model, PeftModel)))
    kind = config.critic or ("adapter" if isinstance(model, PeftModel) else "head")
    if kind == "model":
        return _build_model_critic(model, config, vocabulary)
    if config.critic_model_name_or_path is not None and _saved_critic(config) is None:
        raise ValueError(
            f"`critic_model_name_or_path` is {config.critic_model_name_or_path!r}, which holds no critic. "
            f"`critic={kind!r}` can start from a checkpoint of `SOPPOTrainer` only; another model is for "
            "`critic='model'`."
        )
    head = ValueHead(causal_lm_of(model).config.get_text_config().hidden_size, trained_dtype(model))
    if kind == "head":
        return HeadCritic(head, config.critic_trunk_gradient)
    return _build_adapter_critic(model, head, config)


def _build_adapter_critic(model: Any, head: ValueHead, config: SOPPOConfig) -> AdapterCritic:
    dtype = trained_dtype(model)
    add_critic_adapter(model)
    for name, parameter in model.named_parameters():
        if is_critic_name(name) and "lora_magnitude_vector" not in name:  # DoRA's is too fine for bfloat16
            parameter.data = parameter.data.to(dtype)
    return AdapterCritic(head, model)


def _build_model_critic(model: Any, config: SOPPOConfig, vocabulary: int) -> ModelCritic:
    policy = causal_lm_of(model)
    if policy.config.get_text_config() is not policy.config:
        raise ValueError(
            f"`critic='model'` reads text alone, but the policy is a {type(policy).__name__}. Use `critic='head'`, or "
            "`critic='adapter'` with LoRA."
        )
    own = policy.config._name_or_path
    path = config.critic_model_name_or_path or own
    if not path:
        raise ValueError(
            "`critic='model'` starts from the policy's own checkpoint, but the policy was not loaded from one. Set "
            "`critic_model_name_or_path`."
        )
    options = {"attn_implementation": policy.config._attn_implementation, "dtype": trained_dtype(model)}
    if path == own and config.model_init_kwargs:
        options["revision"] = config.model_init_kwargs.get("revision")
    saved = _saved_critic(config)
    source = path if saved is None else saved / BACKBONE_FOLDER
    backbone = AutoModel.from_pretrained(source, trust_remote_code=config.trust_remote_code, **options)
    size = backbone.config.get_text_config().vocab_size
    if size < vocabulary:
        raise ValueError(
            f"The critic's model {str(source)!r} has a vocabulary of {size}, but the tokenizer knows {vocabulary} "
            "tokens. Set `critic_model_name_or_path` to a model of the policy's family."
        )
    return ModelCritic(ValueHead(backbone.config.get_text_config().hidden_size, backbone.dtype), backbone)


def trained_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the parameters that are trained: ZeRO-3 gathers them together, so the critic's are the same."""
    return next(p.dtype for p in model.parameters() if p.requires_grad)


def check_trained_dtypes(model: nn.Module) -> None:
    """Raise ValueError unless all trained parameters have one dtype, as ZeRO-3 needs them to."""
    by_dtype = {p.dtype: name for name, p in model.named_parameters() if p.requires_grad}
    if len(by_dtype) > 1:
        examples = ", ".join(f"{dtype} ({name})" for dtype, name in by_dtype.items())
        raise ValueError(
            f"Under ZeRO-3 all trained parameters must have one dtype, but there are {examples}. Load the model and "
            "its adapters in one dtype, for instance with `model_init_kwargs={'dtype': 'bfloat16'}` and a "
            "`peft_config` instead of a ready PEFT model."
        )
