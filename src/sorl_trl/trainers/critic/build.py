"""Builds the critic that a configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModel

from sorl_trl.rollout.slots.support import IN_SEGMENTS
from sorl_trl.trainers.critic.adapter import AdapterCritic, add_critic_adapter
from sorl_trl.trainers.critic.checkpoint import BACKBONE_FOLDER, CONFIG_FILE, critic_folder, restore_critic
from sorl_trl.trainers.critic.model import (
    CRITIC_ATTRIBUTE,
    Critic,
    HeadCritic,
    ModelCritic,
    ValueHead,
    attach_critic,
    causal_lm_of,
    is_critic_name,
)
from sorl_trl.trainers.so_ppo_config import SOPPOConfig


def setup_critic(model: Any, config: SOPPOConfig, vocabulary: int) -> Critic:
    """Build the critic, attach it to `model`, and load what `critic_model_name_or_path` names.

    The critic is the same on every rank, whatever was sampled before. `vocabulary` is the number of tokens in the
    tokenizer.

    Raises:
        ValueError: The configuration does not fit `model`.
    """
    if hasattr(causal_lm_of(model), CRITIC_ATTRIBUTE):
        raise ValueError("The policy already has the critic of an earlier trainer: load the policy again.")
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(config.seed)
        critic = _build(model, config, vocabulary)
    attach_critic(causal_lm_of(model), critic.to(model.device))
    saved = _saved_critic(config)
    if saved is not None:
        restore_critic(critic, model, saved)
    return critic


def _saved_critic(config: SOPPOConfig) -> Path | None:
    """The folder of a critic that `critic_model_name_or_path` names, directly or by its checkpoint."""
    path = config.critic_model_name_or_path
    folder = None if path is None else critic_folder(path)
    return folder if folder is not None and (folder / CONFIG_FILE).is_file() else None


def _build(model: Any, config: SOPPOConfig, vocabulary: int) -> Critic:
    has_peft = isinstance(model, PeftModel)
    kind = config.critic or ("adapter" if has_peft else "head")
    if kind == "head" and config.critic_learning_rate is not None:
        raise ValueError(
            f"`critic_learning_rate` is {config.critic_learning_rate}, but `critic='head'` is nothing but a head: set "
            "`value_head_learning_rate` instead, in units of the return."
        )
    if kind == "adapter" and not has_peft:
        raise ValueError("`critic='adapter'` needs a PEFT model: pass a `peft_config`, or use 'head' or 'model'.")
    if config.critic_trunk_gradient and kind != "head":
        raise ValueError(f"`critic_trunk_gradient` is True, but needs `critic='head'`: the critic is {kind!r}.")
    if kind == "model":
        return _build_model_critic(model, config, vocabulary)
    if config.critic_model_name_or_path is not None and _saved_critic(config) is None:
        raise ValueError(
            f"`critic_model_name_or_path` is {config.critic_model_name_or_path!r}, which holds no critic. "
            f"`critic={kind!r}` can only start from a run or checkpoint of `SOPPOTrainer`; other models need "
            "`critic='model'`."
        )
    head = ValueHead(causal_lm_of(model).config.get_text_config().hidden_size, trained_dtype(model))
    if kind == "head":
        return HeadCritic(head, config.critic_trunk_gradient)
    adapter = add_critic_adapter(model)
    for name, parameter in model.named_parameters():
        if is_critic_name(name) and "lora_magnitude_vector" not in name:  # DoRA's needs more than bfloat16
            parameter.data = parameter.data.to(head.weight.dtype)
    return AdapterCritic(head, model, adapter)


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
    attention = policy.config._attn_implementation
    options = {
        "attn_implementation": "sdpa" if attention == IN_SEGMENTS else attention,
        "dtype": trained_dtype(model),
    }
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
    """The dtype of the trained parameters, which the critic shares because ZeRO-3 gathers them together."""
    return next(p.dtype for p in model.parameters() if p.requires_grad)
