"""Estimates how much memory a run takes on each device."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from sorl_trl.rollout.slots.engine import CACHE_SHARE
from sorl_trl.trainers.config import TurnLevelConfig

TILE = (4096, 32768)
"""The tokens and the words for which TRL's head computes logits at a time. It keeps none of them."""
TILE_COPIES = 7.25
"""How many float32 tensors of a tile's size its backward has at once without Triton, beside the tile."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. Not all rows exist at the same time: `training` and `generating` are the two peaks."""

    rows: dict[str, float]
    training: float
    generating: float

    @property
    def peak(self) -> float:
        return max(self.training, self.generating)


def estimate(model: Any, config: TurnLevelConfig, longest: int, cache_gib: float | None = None) -> Memory:
    """Estimate what one device holds, with Adam.

    Weights and optimizer state are always there. A backward pass begins with all activations that were kept, the
    logits of a tile and the head's gradient in float32; it ends with all gradients, that of the embeddings once more,
    and the activations of one layer. At its beginning, there are gradients only if they accumulate.

    `model` is the policy as it is trained, with adapters and critic. `longest` is the number of tokens of the longest
    trajectory, including its prompt.
    """
    parts = [config.world_size if _stage(config) >= stage else 1 for stage in (3, 2, 1)]
    weights, gradients, optimizer = (size / part for size, part in zip(_state(model, config), parts, strict=True))
    reference = weights if config.beta and not hasattr(model, "peft_config") else 0
    tokens = config.per_device_train_batch_size * longest
    kept, layer = _activations(model, config, tokens)
    head = model.get_output_embeddings().weight
    head_gradient = 4 * _count([head]) if head.requires_grad else 0
    logits = _logits(model, config, tokens) + head_gradient
    before = gradients if config.gradient_accumulation_steps > 1 else 0
    cache = 0 if config.use_vllm else _cache(model, config, longest, cache_gib)
    gathered = 0 if config.use_vllm else weights * (parts[0] - 1)
    vllm = available_bytes(config.device) * config.vllm_gpu_memory_utilization if _has_vllm(config) else 0
    copies = 0 if config.use_vllm else weights * (config.async_staleness and config.async_staleness + 1)
    always = weights + reference + optimizer + copies
    rows = {
        "weights": weights,
        "reference model": reference,
        "copies that sample ahead": copies,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": kept + (layer if config.gradient_checkpointing else 0),
        "logits": logits,
        "keys and values": cache,
        "weights gathered to generate": gathered,
        "vLLM": vllm,
    }
    return Memory(
        {name: size for name, size in rows.items() if size},
        training=always
        + kept
        + max(logits + before, gradients + head_gradient + layer)
        + (0 if config.vllm_enable_sleep_mode else vllm),
        generating=always + gathered + max(cache, vllm),
    )


def _state(model: Any, config: TurnLevelConfig) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer, before anything is sharded."""
    everything, trained = list(model.parameters()), _trained(model)
    if config.deepspeed_plugin is not None and _halves(config):  # weights in half precision, float32 in its state
        return 2 * _count(everything), 2 * _count(trained), 12 * _count(trained)
    return _bytes(everything), _bytes(trained), 2 * (_count if "8bit" in config.optim else _bytes)(trained)


def _activations(model: Any, config: TurnLevelConfig, tokens: int) -> tuple[float, float]:
    """What is kept for the backward pass, and all activations of one layer.

    For each token, a layer has the inputs of its norms in float32 (3 numbers of the hidden size each), and queries,
    keys, values and outputs of its attention and its feed-forward part. Checkpointing keeps only a layer's input.
    Autocast also keeps copies of the weights in half precision.
    """
    shape = model.config.get_text_config()
    critic = getattr(config, "critic", "head") or ("adapter" if hasattr(model, "peft_config") else "head")
    layers = shape.num_hidden_layers * (1 if critic == "head" else 2)
    hidden = shape.hidden_size
    inner = getattr(shape, "intermediate_size", None) or 4 * hidden
    layer = tokens * (6 * hidden * 4 + (6 * hidden + 4 * inner) * _element(model, config))
    trained = _trained(model)
    by_autocast = _halves(config) and config.deepspeed_plugin is None and trained[0].dtype == torch.float32
    copies = 2 * _count(trained) if by_autocast else 0
    return layers * (tokens * hidden * 4 if config.gradient_checkpointing else layer) + copies, layer


def _logits(model: Any, config: TurnLevelConfig, tokens: int) -> float:
    rows = min(tokens, TILE[0])
    words = min(model.config.get_text_config().vocab_size, TILE[1])
    copies = 0 if config.device.type == "cuda" else TILE_COPIES * 4 * rows * words
    # TRL allocates a tile of full width, however few words there are.
    return rows * TILE[1] * _element(model, config) + copies


def _cache(model: Any, config: TurnLevelConfig, longest: int, gib: float | None) -> float:
    """The keys and values of the trajectories that one process generates together."""
    shape = model.config.get_text_config()
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    heads = getattr(shape, "num_key_value_heads", shape.num_attention_heads)
    token_size = 2 * head * heads * shape.num_hidden_layers * _element(model, config)
    share = CACHE_SHARE["cuda" if config.device.type == "cuda" else "cpu"]
    limit = available_bytes(config.device) * share if gib is None else gib * 2**30
    return float(min(config.generation_batch_size // config.world_size * longest * token_size, limit))


def _trained(model: Any) -> list[torch.Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _count(parameters: Iterable[torch.Tensor]) -> int:
    """The number of elements. Partitioned parameters of ZeRO-3 count as a whole."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)


def _bytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(_count([parameter]) * parameter.element_size() for parameter in parameters)


def _halves(config: TurnLevelConfig) -> bool:
    return bool(config.bf16 or config.fp16)


def _element(model: Any, config: TurnLevelConfig) -> int:
    """The size of an activation's element, in bytes."""
    return 2 if _halves(config) else int(model.dtype.itemsize)


def _has_vllm(config: TurnLevelConfig) -> bool:
    """Whether vLLM runs on the policy's own GPU."""
    return bool(config.use_vllm and config.vllm_mode == "colocate" and config.device.type == "cuda")


def _stage(config: TurnLevelConfig) -> int:
    """The stage of ZeRO; FSDP counts as 3."""
    if config.deepspeed_plugin is not None:
        return int(config.deepspeed_plugin.zero_stage)
    return 3 if os.environ.get("ACCELERATE_USE_FSDP") == "true" else 0


def available_bytes(device: torch.device) -> int:
    """All of a GPU's memory, or this process's share of a CPU's available memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().available) // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
