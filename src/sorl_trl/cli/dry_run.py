"""`sorl train --dry_run`: builds what a run would build, rehearses two questions, and says what one step will do.

The rehearsal generates with the policy, searches and scores, as a training step does. Nothing is trained, and nothing
is written into `output_dir`, but a missing index is built, as training would.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain
from math import ceil, inf
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import PartialState
from transformers import SchedulerType
from transformers.trainer_utils import SaveStrategy

from sorl_trl.command_line import UserMistake
from sorl_trl.qa import encode_prompts
from sorl_trl.recipe.arguments import Arguments
from sorl_trl.recipe.build import build_rollout, build_trainer, tokenizer_of
from sorl_trl.recipe.memory import available_bytes, estimate
from sorl_trl.rollout.engine import positions_of
from sorl_trl.search import SearchError, SearchUnavailable
from sorl_trl.text import one_line
from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.late_rollouts import RolloutsAhead

GIB = 2**30
REHEARSED = 2
LONGEST = 64
"""How many prompts, those with the most characters, are tokenized to find the longest."""
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
"""The environment variable with the size in bytes from which glibc's allocator returns freed memory."""
REMEDIES = (
    "Try in this order: vllm_enable_sleep_mode; gradient_checkpointing; half of per_device_train_batch_size with "
    "twice the steps_per_generation and gradient_accumulation_steps; --accelerate_config zero2 or zero3; use_peft; "
    "less max_completion_length"
)
SHOWN = ("reward", "frac_reward_zero_std", "completions/mean_length", "rollout/stop_reason/")
"""Metrics are shown if their names begin like this."""


def try_out(arguments: Arguments) -> None:
    """Rehearse a run. Raises UserMistake, whose one line says why it cannot train."""
    try:
        with TemporaryDirectory() as folder:
            output_dir, arguments.config.output_dir = arguments.config.output_dir, folder
            rollout = build_rollout(arguments, tokenizer_of(arguments))
            trainer = build_trainer(arguments, rollout)
            show(chain(run_table(arguments, trainer), plan(arguments, trainer, rollout), rehearse(trainer)), trainer)
    except (ValueError, RuntimeError, OSError, ImportError, SearchUnavailable, SearchError) as error:
        raise UserMistake(one_line(error)) from error
    except Exception as error:  # a reward function's or a tool's, whose message may be a single word
        raise UserMistake(f"{type(error).__name__}: {one_line(error)}") from error
    trainer.accelerator.print(f"This can train, into {output_dir}.")
    PartialState().destroy_process_group()


def show(rows: Iterable[tuple[str, str]], trainer: TurnLevelTrainer) -> None:
    """Print rows, once for all machines."""
    for name, text in rows:
        trainer.accelerator.print(f"{name:10} {text}", flush=True)


def run_table(arguments: Arguments, trainer: TurnLevelTrainer) -> Iterator[tuple[str, str]]:
    """What a run is, as names and texts. `sorl train` shows it before training, and the dry run before all else."""
    config, processes = trainer.args, trainer.accelerator.num_processes
    trained = "LoRA" if arguments.model.use_peft else "all weights"
    yield "trainer", f"{arguments.trainer.trainer}, {trained} of {arguments.model.model_name_or_path}"
    yield "method", trainer.method.describe()
    level, epsilon, target = config.importance_sampling_level, config.epsilon, config.target_kl
    yield "loss", f"{config.loss_type}, {level} ratios, epsilon {epsilon:g}, target_kl {target:g}"
    size, group = config.generation_batch_size, config.num_generations
    rollout = f"{size} trajectories = {size // group} questions x {group}, for {config.updates_per_rollout:g} updates"
    yield "rollout", f"{rollout}, on {processes} process{'es' * (processes > 1)}"
    own = (
        "copies of the policy, slots" if config.async_staleness else f"transformers, {arguments.engine.rollout_engine}"
    )
    yield "engine", f"vLLM, {config.vllm_mode}" if config.use_vllm else own
    yield "saved", _saved(trainer)


def _saved(trainer: TurnLevelTrainer) -> str:
    config, every = trainer.args, trainer.args.save_trajectories_steps
    strategy = SaveStrategy(config.save_strategy).value
    checkpoints = f"each {config.save_steps:g} steps" if strategy == "steps" else strategy
    trajectories = f"each {every} steps" if every else "no"
    trackers = ", ".join(config.report_to) or "no"
    return f"the policy; checkpoints: {checkpoints}; trajectories: {trajectories}; trackers: {trackers}"


def plan(arguments: Arguments, trainer: TurnLevelTrainer, rollout: Any) -> Iterator[tuple[str, str]]:
    """Whether the run fits, and whether the search engine answers, because the rehearsal might not search.

    Raises:
        ValueError: A prompt leaves no room for a single token, or a device has too little memory.
    """
    prompt, positions = longest_prompt(trainer), positions_of(trainer.model) or inf
    if prompt >= positions:
        raise ValueError(f"the longest prompt has {prompt} tokens, but the model has {positions} positions")
    most = int(arguments.config.max_completion_length)
    yield from _updates(trainer)
    yield "lengths", f"longest prompt {prompt} + max_completion_length {most} of {positions} positions"
    if not arguments.rollout.agent:
        limits = arguments.rollout.limits(most)
        both = limits.max_turn_tokens + limits.max_observation_tokens
        yield "", f"{limits.max_turns} turns take up to {limits.max_turns * both + limits.max_turn_tokens} tokens"
    yield from _memory(arguments, trainer, int(min(prompt + most, positions)))
    if arguments.rollout.searches:
        top_k = arguments.rollout.search_top_k
        (found,) = rollout.search.search_batch([str(trainer.train_dataset[0]["question"])], top_k)
        yield "search", f"{len(found)} passages for a question"


def _updates(trainer: TurnLevelTrainer) -> Iterator[tuple[str, str]]:
    """How many updates there are, and the learning rate."""
    config = trainer.args
    *_, steps = trainer.set_initial_training_values(config, trainer.get_train_dataloader())
    rollouts = ceil(steps / config.updates_per_rollout)
    yield "updates", f"{steps} optimizer steps: {rollouts} rollouts x {config.updates_per_rollout:g}"
    schedule, warmup = SchedulerType(config.lr_scheduler_type).value, config.get_warmup_steps(steps)
    yield "", f"learning rate {config.learning_rate:g}, {schedule}, {warmup} steps of warm-up"
    if config.is_on_policy:
        yield "", "warning: ratios, clipping and target_kl act from a rollout's second update on, and there is one:"
        yield "", "set steps_per_generation or num_iterations for several"


def _memory(arguments: Arguments, trainer: TurnLevelTrainer, longest: int) -> Iterator[tuple[str, str]]:
    """One row for each thing that takes memory on a device."""
    config = arguments.config
    needed = estimate(trainer.model, config, longest, arguments.engine.kv_cache_gib)
    limit: float = available_bytes(config.device)
    if config.device.type != "cuda":
        limit += needed.rows["weights"]  # already loaded, so not in what is available
    peaks = {"at most, while training": needed.training, "at most, while generating": needed.generating}
    for number, (name, size) in enumerate({**needed.rows, **peaks, "there is": limit}.items()):
        yield "" if number else "memory", f"{name:30} {size / GIB:7.2f} GiB"
    if config.device.type == "cpu" and THRESHOLD not in os.environ:
        yield "", f"glibc may keep half as much again; with {THRESHOLD}=1048576 it does not, and takes more time"
    if needed.peak > limit:
        raise ValueError(
            f"a step needs about {needed.peak / GIB:.1f} GiB on each device, which has {limit / GIB:.1f}. {REMEDIES}"
        )


def longest_prompt(trainer: TurnLevelTrainer) -> int:
    """The number of tokens in the longest training prompt."""
    prompts = sorted(trainer.train_dataset["prompt"], key=lambda prompt: len(str(prompt)))[-LONGEST:]
    rows = [{"prompt": prompt} for prompt in prompts]
    return max(map(len, encode_prompts(trainer.processing_class, rows, **trainer.chat_template_kwargs)))


def rehearse(trainer: TurnLevelTrainer) -> Iterator[tuple[str, str]]:
    """Collect and score a group of trajectories for each of two questions, as a step does, and show the result.

    Where a run samples from copies of the policy, so does this.
    """
    if trainer._dist.is_zero3 or trainer._dist.is_fsdp:
        yield "rehearsal", "none: ZeRO-3 and FSDP put the weights together in training alone. Try it on one process"
        return
    trainer.model.eval()
    rows = [trainer.train_dataset[i % len(trainer.train_dataset)] for i in range(REHEARSED)]
    if isinstance(trainer.rollout_func, RolloutsAhead) and not trainer.use_vllm:
        trainer.rollout_func = trainer.rollout_func.from_a_copy
    with torch.no_grad():
        group = range(trainer.num_generations_eval)
        trainer._generate_and_score_completions([{**row} for row in rows for _ in group])  # each gets columns
    metrics = {name: sum(values) / len(values) for name, values in trainer._metrics["eval"].items() if values}
    if trainer.num_generations_eval == 1:
        metrics.pop("frac_reward_zero_std", None)  # TRL's is 1 for a group of one
    yield "rehearsal", f"{REHEARSED} questions x {trainer.num_generations_eval} trajectories"
    yield from (("", f"{name} {mean:.3g}") for name, mean in metrics.items() if name.startswith(SHOWN) and mean)
    yield "", f"prompt      {one_line(trainer._logs['prompt'][0])[-300:]}"
    yield "", f"completion  {one_line(trainer._logs['completion'][0])[:1000]}"
