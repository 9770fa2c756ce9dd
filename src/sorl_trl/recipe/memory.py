"""How much memory a run takes on each device, from numbers alone, and what to turn where that is too much."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from sorl_trl.trainers.config import TurnLevelConfig

TILE = (4096, 32768)
"""Of so many tokens by so many words TRL's head computes logits at a time; it keeps none."""
TILE_COPIES = 7.25
"""Float32 tensors of a tile's size that its backward has at once without Triton, beside the tile."""


@dataclass(frozen=True)
class Sizes:
    """A policy and how it is trained: bytes, parameters and tokens, of one process before anything is sharded."""

    weights: int
    """Bytes of the policy with its critic."""
    trained: int
    """Parameters that are trained."""
    gradients: int
    """Bytes of their gradients."""
    optimizer: int
    """Bytes of the optimizer's state."""
    layers: int
    hidden: int
    inner: int
    """Width of the layers' feed-forward part."""
    keys_and_values: int
    """Numbers per token and layer in the cache."""
    vocabulary: int
    rows: int
    """Trajectories of a micro-batch."""
    longest: int
    """Tokens of the longest trajectory, its prompt included."""
    generated: int
    """Trajectories that the process generates at a time; 0 where vLLM generates."""
    element: int = 4
    """Bytes of an activation: 2 in half precision."""
    reference: int = 0
    """Bytes of the reference model."""
    copies: int = 0
    """Bytes of the weights' copies in half precision, which autocast keeps through a forward pass."""
    accumulates: bool = False
    checkpoints: bool = True
    """Whether activations are computed again in the backward pass."""
    head_is_trained: bool = True
    on_gpu: bool = False
    stage: int = 0
    """Of ZeRO; 3 for FSDP."""
    processes: int = 1
    vllm: int = 0
    """Bytes that a colocated vLLM takes."""
    sleeps: bool = False
    """Whether it gives them back while the policy trains."""
    cache_limit: int | None = None
    """The most bytes of the cache that keys and values are kept in."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. Not all rows are there at once: `training` and `generating` are the two peaks."""

    rows: dict[str, float]
    training: float
    generating: float

    @property
    def peak(self) -> float:
        return max(self.training, self.generating)


def estimate(sizes: Sizes) -> Memory:
    """What one device holds.

    Weights and optimizer state are always there. A backward pass begins with all activations that were kept, the
    logits of a tile and the head's gradient in float32, and ends with all gradients, that of the embeddings once
    more, and the activations of one layer; gradients are there at its beginning only where they accumulate. A layer
    keeps, for each token, the inputs of its norms in float32 (3 numbers of the hidden size each), and queries, keys,
    values and outputs of its attention and its feed-forward part.
    """
    part = [sizes.processes if sizes.stage >= stage else 1 for stage in (3, 2, 1)]
    weights, reference = sizes.weights / part[0], sizes.reference / part[0]
    gradients, optimizer = sizes.gradients / part[1], sizes.optimizer / part[2]
    tokens = sizes.rows * sizes.longest
    layer = tokens * (6 * sizes.hidden * 4 + (6 * sizes.hidden + 4 * sizes.inner) * sizes.element)
    kept = sizes.layers * (tokens * sizes.hidden * 4 if sizes.checkpoints else layer) + sizes.copies
    of_head = 4 * sizes.vocabulary * sizes.hidden * sizes.head_is_trained
    logits = _logits(sizes, tokens) + of_head
    cache = sizes.generated * sizes.longest * sizes.layers * sizes.keys_and_values * sizes.element
    cache = cache if sizes.cache_limit is None else min(cache, sizes.cache_limit)
    always = weights + reference + optimizer
    step = kept + max(logits + gradients * sizes.accumulates, gradients + of_head + layer)
    gathered = sizes.weights - weights if sizes.generated else 0
    rows = {
        "weights": weights,
        "reference model": reference,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": kept + layer * sizes.checkpoints,
        "logits": logits,
        "keys and values": cache,
        "weights gathered to generate": gathered,
        "vLLM, asleep while training" if sizes.sleeps else "vLLM": sizes.vllm,
    }
    return Memory(
        {name: size for name, size in rows.items() if size},
        training=always + step + sizes.vllm * (not sizes.sleeps),
        generating=always + gathered + max(cache, sizes.vllm),
    )


def _logits(sizes: Sizes, tokens: int) -> float:
    tile = min(tokens, TILE[0]) * TILE[1]
    words = min(sizes.vocabulary, TILE[1])
    folded = 0 if sizes.on_gpu else TILE_COPIES * 4 * min(tokens, TILE[0]) * words
    return tile * sizes.element + folded


def remedies(sizes: Sizes) -> Iterator[str]:
    """What makes a run smaller, in the order in which to try it: what costs nothing comes first."""
    if sizes.vllm and not sizes.sleeps:
        yield "vllm_enable_sleep_mode true"
    if not sizes.checkpoints:
        yield "gradient_checkpointing true"
    if sizes.rows > 1:
        yield "half of per_device_train_batch_size with twice the steps_per_generation and gradient_accumulation_steps"
    if sizes.processes > 1 and sizes.stage < 3:
        yield f"--accelerate_config zero{2 if sizes.stage < 2 else 3}"
    if sizes.vllm:
        yield "less vllm_gpu_memory_utilization"
    if sizes.trained * 10 > sizes.weights / 4:
        yield "use_peft true"
    yield "less max_completion_length"


def sizes_of(model: Any, config: TurnLevelConfig, longest: int, cache_gib: float | None = None) -> Sizes:
    """The numbers of a run.

    Args:
        model: the policy as it is trained, with its adapters and its critic.
        config: the trainer's.
        longest: tokens of the longest trajectory, its prompt included.
        cache_gib: `kv_cache_gib`.
    """
    shape, on_gpu = model.config.get_text_config(), config.device.type == "cuda"
    critic = getattr(config, "critic", "head") or ("adapter" if hasattr(model, "peft_config") else "head")
    passes = 1 if critic == "head" else 2
    head = shape.head_dim if getattr(shape, "head_dim", None) else shape.hidden_size // shape.num_attention_heads
    available = available_bytes(config.device)
    colocated = config.use_vllm and config.vllm_mode == "colocate" and on_gpu
    return Sizes(
        **_of_parameters(model, config),
        reference=0 if not config.beta or hasattr(model, "peft_config") else _bytes(model.parameters()),
        layers=shape.num_hidden_layers * passes,
        hidden=shape.hidden_size,
        inner=shape.intermediate_size,
        keys_and_values=2 * head * getattr(shape, "num_key_value_heads", shape.num_attention_heads),
        vocabulary=shape.vocab_size,
        rows=config.per_device_train_batch_size,
        longest=longest,
        generated=0 if config.use_vllm else config.generation_batch_size // config.world_size,
        element=2 if _halves(config) else model.dtype.itemsize,
        accumulates=config.gradient_accumulation_steps > 1,
        checkpoints=config.gradient_checkpointing,
        head_is_trained=model.get_output_embeddings().weight.requires_grad,
        on_gpu=on_gpu,
        stage=_stage(config),
        processes=config.world_size,
        vllm=int(available * config.vllm_gpu_memory_utilization) * colocated,
        sleeps=colocated and config.vllm_enable_sleep_mode,
        cache_limit=int(available / 2 if cache_gib is None else cache_gib * 2**30),
    )


def _of_parameters(model: Any, config: TurnLevelConfig) -> dict[str, int]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = _count(trained)
    sizes = {"weights": _bytes(model.parameters()), "trained": count, "gradients": _bytes(trained)}
    if config.deepspeed_plugin is not None and _halves(config):  # all weights in half precision, float32 in its state
        weights = 2 * _count(model.parameters())
        return {**sizes, "weights": weights, "gradients": 2 * count, "optimizer": 12 * count, "copies": 0}
    states = 2 if "adam" in config.optim else 1
    return {
        **sizes,
        "optimizer": states * (count if "8bit" in config.optim else _bytes(trained)),
        "copies": 2 * count if _halves(config) and trained[0].dtype == torch.float32 else 0,
    }


def _count(parameters: Iterable[torch.Tensor]) -> int:
    """Those of a ZeRO-3 partition count whole."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)


def _bytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(_count([parameter]) * parameter.element_size() for parameter in parameters)


def _halves(config: TurnLevelConfig) -> bool:
    return bool(config.bf16 or config.fp16)


def _stage(config: TurnLevelConfig) -> int:
    if config.deepspeed_plugin is not None:
        return int(config.deepspeed_plugin.zero_stage)
    return 3 if os.environ.get("ACCELERATE_USE_FSDP") == "true" else 0


def available_bytes(device: torch.device) -> int:
    """All of a GPU's memory; of a CPU's the share of this process of what is available."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().available) // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
