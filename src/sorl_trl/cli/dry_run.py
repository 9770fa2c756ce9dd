"""`sorl train --dry_run`: builds what a run would build, rehearses two questions, and describes one step.

The rehearsal generates with the policy, searches and scores, as a training step does. Nothing is trained or written
into `output_dir`, except that a missing index is built, as in training. Memory is estimated per device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import ceil, inf, isnan
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from accelerate import PartialState
from transformers import SchedulerType

from sorl_trl.cli.arguments import Arguments
from sorl_trl.cli.build import build_trainer
from sorl_trl.command_line import UserMistake
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.rollout.engines.base import positions_of
from sorl_trl.rollout.engines.slots.engine import CACHE_SHARE
from sorl_trl.search import SearchError, SearchUnavailable
from sorl_trl.text import one_line
from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.config import TurnLevelConfig
from sorl_trl.trainers.rewards import DEBUG_PAGE

GIB = 2**30
REHEARSED = 2
LONGEST = 64
"""How many of the prompts with the most characters are tokenized to find the longest."""
REMEDIES = (
    "Try in this order: vllm_enable_sleep_mode; gradient_checkpointing; half of per_device_train_batch_size with "
    "twice the steps_per_generation and gradient_accumulation_steps; --accelerate_config zero2 or zero3; use_peft; "
    "lower max_completion_length"
)
SHOWN = ("reward", "frac_reward_zero_std", "completions/mean_length")
"""Prefixes of the metrics to show."""
SHOWN_UNLESS_0 = ("rollout/stop_reason/", "rollout/masked_share", "endpoint/error_share", "endpoint/uncalled_share")


def try_out(arguments: Arguments) -> None:
    """Rehearse a run. Raises UserMistake with a one-line reason if it cannot train."""
    try:
        with TemporaryDirectory() as folder:
            output_dir, arguments.config.output_dir = arguments.config.output_dir, folder
            trainer = build_trainer(arguments)
            show(chain(run_table(arguments, trainer), plan(arguments, trainer), rehearse(trainer)), trainer)
    except (ValueError, RuntimeError, OSError, ImportError, SearchUnavailable, SearchError) as error:
        raise UserMistake(one_line(error)) from error
    except Exception as error:  # a reward function's or a tool's, whose message may be a single word
        raise UserMistake(f"{type(error).__name__}: {one_line(error)}") from error
    trainer.accelerator.print(f"Ready to train into {output_dir}{caveat(trainer)}.")
    PartialState().destroy_process_group()


def show(rows: Iterable[tuple[str, str]], trainer: TurnLevelTrainer) -> None:
    """Print rows once, on the main process."""
    for name, text in rows:
        trainer.accelerator.print(f"{name:10} {text}", flush=True)


def run_table(arguments: Arguments, trainer: TurnLevelTrainer) -> Iterator[tuple[str, str]]:
    """The settings of a run, as names and texts. `sorl train` and the dry run show them first."""
    config, processes = trainer.args, trainer.accelerator.num_processes
    trained = "LoRA" if arguments.model.use_peft else "all weights"
    yield "trainer", f"{arguments.trainer.trainer}, {trained} of {arguments.model.model_name_or_path}"
    yield "method", trainer.method.name or "your own"
    for name, piece in trainer.method.shown():
        yield "", f"{name:10} {piece}"
    size, group = config.generation_batch_size, config.num_generations
    rollout = f"{size} trajectories = {size // group} questions x {group}, for {config.updates_per_rollout:g} updates"
    yield "rollout", f"{rollout}, on {processes} process{'es' * (processes > 1)}"
    own = (
        "copies of the policy, slots" if config.async_staleness else f"transformers, {arguments.engine.rollout_engine}"
    )
    yield "engine", f"vLLM, {config.vllm_mode}" if config.use_vllm else own


def plan(arguments: Arguments, trainer: TurnLevelTrainer) -> Iterator[tuple[str, str]]:
    """Check that the run fits, and that the search engine answers, because the rehearsal might not search.

    Raises:
        ValueError: A prompt leaves no room for a token, or a device has too little memory.
    """
    prompt, positions = longest_prompt(trainer), positions_of(trainer.model) or inf
    has_agent = arguments.rollout.has_agent  # which makes prompts of its own
    if prompt >= positions and not has_agent:
        raise ValueError(f"the longest prompt has {prompt} tokens, but the model has {positions} positions")
    most = int(arguments.config.max_completion_length)
    yield from _updates(trainer)
    longest = f"longest {'task' if has_agent else 'prompt'} {prompt}"
    yield "lengths", f"{longest} + max_completion_length {most} of {positions} positions"
    if has_agent:
        yield "", f"the agent's calls return up to {arguments.rollout.max_turn_tokens} tokens each"
    if arguments.rollout.searches or arguments.rollout.environment:
        limits = arguments.parts.limits
        both = limits.max_turn_tokens + limits.max_observation_tokens
        yield "", f"{limits.max_turns} turns take up to {limits.max_turns * both + limits.max_turn_tokens} tokens"
    yield from _memory(arguments, trainer, int(min(prompt + most, positions)))
    if search := arguments.parts.built_search:
        question = str(trainer.train_dataset[0]["question"])
        (found,) = search.backend.search_batch([question], arguments.parts.limits.top_k)
        yield "search", f"{len(found)} passages for a question"


def _updates(trainer: TurnLevelTrainer) -> Iterator[tuple[str, str]]:
    """The number of updates, and the learning rate."""
    config = trainer.args
    *_, steps = trainer.set_initial_training_values(config, trainer.get_train_dataloader())
    rollouts = ceil(steps / config.updates_per_rollout)
    yield "updates", f"{steps} optimizer steps: {rollouts} rollouts x {config.updates_per_rollout:g}"
    schedule, warmup = SchedulerType(config.lr_scheduler_type).value, config.get_warmup_steps(steps)
    yield "", f"learning rate {config.learning_rate:g}, {schedule}, {warmup} steps of warm-up"
    if config.is_on_policy:
        yield "", "warning: ratios, clipping and target_kl act from a rollout's second update on, but there is one:"
        yield "", "set steps_per_generation or num_iterations for more"


def _memory(arguments: Arguments, trainer: TurnLevelTrainer, longest: int) -> Iterator[tuple[str, str]]:
    """One row for each use of memory on a device."""
    config = arguments.config
    limit: float = available_bytes(config.device)
    needed = estimate(trainer.model, config, longest, limit, arguments.engine.kv_cache_gib)
    if config.device.type != "cuda":
        limit += needed.rows["weights"]  # already loaded, so not in what is available
    peaks = {"at most, while training": needed.training, "at most, while generating": needed.generating}
    for number, (name, size) in enumerate({**needed.rows, **peaks, "there is": limit}.items()):
        yield "" if number else "memory", f"{name:30} {size / GIB:7.2f} GiB"
    if needed.peak > limit:
        raise ValueError(
            f"a step needs about {needed.peak / GIB:.1f} GiB on each device, which has {limit / GIB:.1f}. {REMEDIES}"
        )


def longest_prompt(trainer: TurnLevelTrainer) -> int:
    """The number of tokens in the longest training prompt."""
    prompts = sorted(trainer.train_dataset["prompt"], key=lambda prompt: len(str(prompt)))[-LONGEST:]
    setup = RolloutSetup(trainer.processing_class, trainer.chat_template, trainer.chat_template_kwargs)
    return max(map(len, setup.encode(prompts)))


def rehearse(trainer: TurnLevelTrainer) -> Iterator[tuple[str, str]]:
    """Collect and score a group of trajectories for each of two questions, as a step does, and show the result."""
    if trainer._dist.is_zero3 or trainer._dist.is_fsdp:
        yield "rehearsal", "none: ZeRO-3 and FSDP gather weights only in training. Try it with one process"
        return
    trainer.model.eval()
    rows = [trainer.train_dataset[i % len(trainer.train_dataset)] for i in range(REHEARSED)]
    with torch.no_grad():
        group = range(trainer.num_generations_eval)
        trainer._generate_and_score_completions([{**row} for row in rows for _ in group])  # each gets columns
    yield "rehearsal", f"{REHEARSED} questions x {trainer.num_generations_eval} trajectories"
    for name, mean in rehearsed(trainer).items():
        if name.startswith(SHOWN) or (mean and name.startswith(SHOWN_UNLESS_0)):
            yield "", f"{name} {mean:.3g}"
    yield "", f"prompt      {one_line(trainer._logs['prompt'][0])[-300:]}"
    yield "", f"completion  {one_line(trainer._logs['completion'][0])[:1000]}"


def rehearsed(trainer: TurnLevelTrainer) -> dict[str, float]:
    """The metrics of the rehearsal; none if there was no rehearsal."""
    metrics = {name: sum(values) / len(values) for name, values in trainer._metrics["eval"].items() if values}
    if trainer.num_generations_eval == 1:
        metrics.pop("frac_reward_zero_std", None)  # TRL's is 1 for a group of one
    return metrics


def caveat(trainer: TurnLevelTrainer) -> str:
    """What the rehearsal leaves in doubt about training, as the end of a sentence."""
    found = rehearsed(trainer)
    if isnan(found.get("reward", 0.0)):
        return ", but no trajectory of the rehearsal got a reward"
    are_alike = found.get("frac_reward_zero_std") == 1 and not trainer._has_critic
    if are_alike or found.get("reward_std") == 0:
        return (
            ", but no rewards of a group differed in the rehearsal, and such groups teach nothing: see "
            f"`frac_reward_zero_std` in {DEBUG_PAGE}"
        )
    return ""


TILE = (4096, 32768)
"""The numbers of tokens and vocabulary entries for which TRL's head computes logits at a time, keeping none."""
TILE_COPIES = 7.25
"""How many float32 tensors of a tile's size its backward holds besides the tile, without Triton."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. Not all rows exist at the same time: `training` and `generating` are the two peaks."""

    rows: dict[str, float]
    training: float
    generating: float

    @property
    def peak(self) -> float:
        return max(self.training, self.generating)


def estimate(
    model: Any, config: TurnLevelConfig, longest: int, available: float, cache_gib: float | None = None
) -> Memory:
    """Estimate the memory of one device, with Adam.

    Weights and optimizer state are always present. A backward pass begins with all saved activations, the logits of a
    tile and the head's gradient in float32; it ends with all gradients, a second copy of the embeddings' gradient, and
    the activations of one layer. Gradients exist at its beginning only if they accumulate.

    `model` is the policy in training, with adapters and critic. `longest` is the number of tokens of the longest
    trajectory, including its prompt. `available` bytes are there, of which vLLM or keys and values take a share.
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
    cache = 0 if config.use_vllm else _cache(model, config, longest, available, cache_gib)
    gathered = 0 if config.use_vllm else weights * (parts[0] - 1)
    shares_gpu = config.use_vllm and config.vllm_mode == "colocate" and config.device.type == "cuda"
    vllm = available * config.vllm_gpu_memory_utilization if shares_gpu else 0
    copies = 0 if config.use_vllm else weights * (config.async_staleness and config.async_staleness + 1)
    always = weights + reference + optimizer + copies
    rows = {
        "weights": weights,
        "reference model": reference,
        "copies for async rollouts": copies,
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
    """The bytes saved for the backward pass, and all activations of one layer.

    Per token, a layer has its norms' inputs in float32 (3 times the hidden size each), the queries, keys, values and
    outputs of its attention, and its feed-forward part. Checkpointing keeps only a layer's input. Autocast also keeps
    copies of the weights in half precision.
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


def _cache(model: Any, config: TurnLevelConfig, longest: int, available: float, gib: float | None) -> float:
    """The bytes of keys and values for the trajectories that one process generates at once."""
    shape = model.config.get_text_config()
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    heads = getattr(shape, "num_key_value_heads", shape.num_attention_heads)
    token_size = 2 * head * heads * shape.num_hidden_layers * _element(model, config)
    share = CACHE_SHARE["cuda" if config.device.type == "cuda" else "cpu"]
    limit = available * share if gib is None else gib * GIB
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
