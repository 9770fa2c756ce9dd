"""Checks config, method and dataset before a run, and switches off the noise of training mode."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import PreTrainedConfig

from sorl_trl.methods import METHODS, Method
from sorl_trl.rollout.agent_rollout import AgentRollout
from sorl_trl.rollout.engines.slots import NotServed, check_served
from sorl_trl.rollout.policy_rollout import ADDED_COLUMNS, PolicyRollout
from sorl_trl.rollout.protocol import endless_messages
from sorl_trl.trainers.config import TurnLevelConfig
from sorl_trl.trainers.host import Host
from sorl_trl.trainers.rewards import OF_TRL, SAMPLES, check_needed
from sorl_trl.trainers.samples import is_direct

logger = logging.getLogger(__name__)
LONG_TURN = 50
"""How many tokens a turn may have before a trainer without a trust region warns. Ours."""


def warn_on_main_process(args: TurnLevelConfig, message: str) -> None:
    """Warn on the main process only, without the rank that accelerate's logger would prefix."""
    if args.process_index == 0:
        logger.warning(message)


def check_config(wanted: type[TurnLevelConfig], args: Any) -> None:
    """Raise TypeError for another trainer's config. With dropout disabled, switch NEFTune off and warn."""
    if not isinstance(args, wanted):
        package = "sorl_trl.experimental" if "experimental" in wanted.__module__ else "sorl_trl"
        raise TypeError(
            f"`args` is a {type(args).__name__}, but must be a {wanted.__name__}: write `from {package} import "
            f"{wanted.__name__}` and keep the arguments."
        )
    if args.disable_dropout and args.neftune_noise_alpha:
        noise = f"`neftune_noise_alpha` is {args.neftune_noise_alpha:g}, but `disable_dropout` is True and switches"
        warn_on_main_process(args, f"{noise} NEFTune off, too: its noise would be in every ratio.")
        args.neftune_noise_alpha = None


def check_trained(model: nn.Module) -> None:
    """Raise ValueError if no parameter of the policy is trainable, which is how PEFT loads adapters by default."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("No parameter of the policy is trainable. Load a PEFT model with `is_trainable=True`.")


def check_dataset(host: Host) -> None:
    """Raise ValueError for no or too few rows, rows without a prompt, and text where messages are needed.

    Also for a column with a taken name, and for one that a reward function needs and no `rollout_func` could add. TRL
    would train on no rows at all if a rollout took more than there are. Warn if messages do not end generation.
    """
    args, dataset, asked = host.args, host.train_dataset, host.eval_dataset
    asked = asked if isinstance(asked, dict) else {"eval_dataset": asked}
    known = {name: rows for name, rows in {"train_dataset": dataset, **asked}.items() if isinstance(rows, Dataset)}
    for name, rows in known.items():
        if not len(rows):
            raise ValueError(f"`{name}` is empty, but must have at least one row.")
        check_names(host, f"`{name}`", rows.column_names)
        if "prompt" in rows.column_names:
            _check_prompt(host, name, rows[0]["prompt"])
        if host.rollout_func is None:
            for function, called in zip(host.reward_funcs, host.reward_names, strict=True):
                if not isinstance(function, nn.Module):
                    check_needed(function, called, rows[0])
    prompts = int(args.generation_batch_size) // int(args.num_generations)
    if isinstance(dataset, Dataset) and len(dataset) < prompts:
        raise ValueError(
            f"`train_dataset` has {len(dataset)} prompts, but a rollout takes {prompts}: `generation_batch_size` "
            f"{args.generation_batch_size} / `num_generations` {args.num_generations}."
        )


def check_trust_region(host: Host) -> None:
    """Warn if the method lets long turns move far, unless the named method does."""
    args, method, most = host.args, host.method, host.args.max_completion_length or sys.maxsize
    meant, off = METHODS.get(method.name, Method()), []
    if meant.target_kl and not method.target_kl:
        off.append("`target_kl` is 0")
    if method.ratio.level == "turn" and meant.clip.by_length and not method.clip.by_length:
        off.append("`scale_clip_range` (`by_length` of the clip) is False")
    if args.is_on_policy or not off:
        return
    if host.rollout is not None:
        most = min(most, host.setup.limits.max_turn_tokens)
    if most > LONG_TURN:
        problem = (
            f"{' and '.join(off)}, but turns may have {most} tokens, and with turns of 76, runs collapsed like that"
        )
        warn_on_main_process(args, f"{problem}: keep the default.")


def check_names(host: Host, name: str, columns: Collection[str]) -> None:
    """Raise ValueError for no `prompt`, and for a column whose name stands for something else in reward functions."""
    rollout = host.rollout
    if "prompt" not in columns and (rollout is None or rollout.needs_prompts):
        raise ValueError(f"{name} has the columns {[*columns]}, but must have `prompt`.")
    taken = {*OF_TRL, SAMPLES} | ({*ADDED_COLUMNS} if rollout is not None else set())
    if found := sorted(taken & {*columns}):
        raise ValueError(
            f"{name} has the column {found[0]!r}, but reward functions get something else under that name: rename it."
        )


def _check_prompt(host: Host, name: str, prompt: Any) -> None:
    rollout = host.rollout
    in_messages = isinstance(rollout, AgentRollout) and rollout.protocol.turns_are_messages
    if isinstance(prompt, str) and in_messages:
        raise ValueError(
            f"`{name}` has the prompt {prompt[:80]!r}, but tool calls are messages of the chat template: each prompt "
            "must be a list of messages, such as [{'role': 'user', 'content': '…'}]."
        )
    is_chat = not isinstance(prompt, str) and host.tokenizer.chat_template is not None
    if is_chat and name == "train_dataset":
        problem = endless_messages(host.tokenizer, host.eos_token_ids, host.template_options)
        if problem is not None:
            warn_on_main_process(host.args, problem)


def check_ahead(host: Host) -> None:
    """Raise ValueError if a trainer with `async_staleness` cannot make asynchronous rollouts."""
    if reason := _why_not_ahead(host, host.args, host.rollout):
        raise ValueError(f"`async_staleness` is {host.args.async_staleness}, but {reason}.")


def _why_not_ahead(host: Host, args: TurnLevelConfig, rollout: PolicyRollout | None) -> str | None:
    if rollout is None or not is_direct(rollout):
        return (
            "that takes `tools`, or an `AgentRollout` or an `EndpointRollout` as `rollout_func`: override its "
            "`collect`, not its `__call__`"
        )
    dataset = host.train_dataset
    columns = {*dataset.column_names} if isinstance(dataset, Dataset) else set()
    if "prompt" not in columns or {"image", "images"} & columns:
        return "`train_dataset` must be a `datasets.Dataset` with a column `prompt`, and without images"
    rows = int(args.generation_batch_size) // host.accelerator.num_processes
    if args.async_order == "completed" and rows % int(args.num_generations):
        return (
            f"`async_order` is 'completed', but the {rows} rows of a process are not a multiple of `num_generations`, "
            f"{args.num_generations}: groups would be split across processes"
        )
    if host.uses_vllm:
        mode = f"`vllm_mode` is {args.vllm_mode!r}"
        return None if args.vllm_mode == "server" else f"{mode}, which cannot sample during training: use 'server'"
    if host.is_sharded or args.cast_lm_head_to_fp32 or rollout.engine.rollout_engine == "lockstep":
        return (
            "without vLLM, copies of the policy sample in slots, which works neither with sharded parameters, nor in "
            "'lockstep', nor with `cast_lm_head_to_fp32`: set `use_vllm=True` and `vllm_mode='server'`"
        )
    try:
        check_served(host.model, host.generation_config)
    except NotServed as reason:
        return f"copies of the policy sample in slots, and {reason}: set `use_vllm=True` and `vllm_mode='server'`"
    return None


def disable_noise(model: nn.Module) -> None:
    """Set to 0 all noise that a model draws in training mode: every kind of dropout, and the jitter of routers.

    Dropout layers keep the strength in `p`; others in a number, or a number per adapter, with "drop" or "jitter" in
    its name. Falcon's layers, for example, read it from the config, which is then saved with zeros.
    """
    modules = [*model.modules()]
    configs = [each.config for each in modules if isinstance(getattr(each, "config", None), PreTrainedConfig)]
    for holder in (*modules, *configs):
        is_dropout = "drop" in type(holder).__name__.lower()
        for name, value in vars(holder).items():
            if not ("drop" in name or "jitter" in name or (is_dropout and name == "p")):
                continue
            if isinstance(value, float):
                setattr(holder, name, 0.0)
            elif isinstance(value, dict):  # PEFT's, by adapter; another may hold modules
                value.update({key: 0.0 for key, each in value.items() if isinstance(each, float)})
