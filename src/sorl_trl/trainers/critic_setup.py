"""Building the critic that a configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModel, PreTrainedModel

from sorl_trl.trainers.critic import Critic, HeadCritic, ModelCritic, ValueHead, attach_critic, is_critic_name
from sorl_trl.trainers.critic_adapter import AdapterCritic, add_critic_adapter
from sorl_trl.trainers.critic_checkpoint import BACKBONE_FOLDER, CONFIG_FILE, read_critic_config, restore_critic
from sorl_trl.trainers.so_ppo_config import SOPPOConfig


def causal_lm_of(model: nn.Module) -> PreTrainedModel:
    """The causal language model under PEFT's wrapper, or `model` itself."""
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def setup_critic(model: Any, config: SOPPOConfig) -> Critic:
    """Build the critic, attach it to `model`, and load what `critic_model_name_or_path` names.

    It is the same on every rank, and independent of what was sampled before.

    Raises:
        ValueError: the configuration does not fit `model`.
    """
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        critic = _build(model, config)
    attach_critic(causal_lm_of(model), critic.to(model.device))
    saved = config.critic_model_name_or_path
    if saved is not None and (Path(saved) / CONFIG_FILE).is_file():
        restore_critic(critic, model, Path(saved))
    return critic


def _build(model: Any, config: SOPPOConfig) -> Critic:
    kind = config.critic or ("adapter" if isinstance(model, PeftModel) else "head")
    if kind == "model":
        return _build_model_critic(model, config)
    if config.critic_model_name_or_path is not None:
        read_critic_config(Path(config.critic_model_name_or_path))
    head = ValueHead(causal_lm_of(model).config.get_text_config().hidden_size, trained_dtype(model))
    if kind == "head":
        return HeadCritic(head, config.critic_trunk_gradient)
    return _build_adapter_critic(model, head, config)


def _build_adapter_critic(model: Any, head: ValueHead, config: SOPPOConfig) -> AdapterCritic:
    if not isinstance(model, PeftModel):
        raise ValueError(
            "`critic='adapter'` needs a PEFT model: pass a `peft_config` (LoRA) to the trainer, or use "
            "`critic='head'` or `critic='model'`."
        )
    if config.critic_trunk_gradient:
        raise ValueError(
            "`critic_trunk_gradient` is set, but is for `critic='head'`; with PEFT the default is 'adapter'."
        )
    dtype = trained_dtype(model)
    add_critic_adapter(model)
    for name, parameter in model.named_parameters():
        if is_critic_name(name):
            parameter.data = parameter.data.to(dtype)
    return AdapterCritic(head, model)


def _build_model_critic(model: Any, config: SOPPOConfig) -> ModelCritic:
    policy = causal_lm_of(model)
    path = config.critic_model_name_or_path or policy.config._name_or_path
    if not path:
        raise ValueError(
            "`critic='model'` starts from the policy's own checkpoint, but the policy was not loaded from one. Set "
            "`critic_model_name_or_path`."
        )
    if (Path(path) / CONFIG_FILE).is_file():
        path = str(Path(path) / BACKBONE_FOLDER)
    backbone = AutoModel.from_pretrained(path, dtype=trained_dtype(model), trust_remote_code=config.trust_remote_code)
    sizes = [m.get_text_config().vocab_size for m in (backbone.config, policy.config)]
    if sizes[0] < sizes[1]:
        raise ValueError(
            f"`critic_model_name_or_path` is {path!r}, whose vocabulary of {sizes[0]} is smaller than the policy's of "
            f"{sizes[1]}: it does not read the policy's tokens."
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
