"""Samples a trajectory for each row of the dataset: from a rollout, asynchronous rollouts, a function, or TRL."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from sorl_trl.rollout.engines.base import positions_of
from sorl_trl.rollout.policy_rollout import MESSAGES, PROMPTS, PolicyRollout
from sorl_trl.rollout.routing import ROUTES
from sorl_trl.rollout.trajectories import closed
from sorl_trl.trainers.host import Host
from sorl_trl.trainers.prompts import prompts_of
from sorl_trl.trainers.returned import read_output
from sorl_trl.types import Trajectory


@dataclass(eq=False)
class Sample:
    """A trajectory in training: what was asked, what reward functions get, and what they return."""

    trajectory: Trajectory
    """As it is trained on."""
    row: dict[str, Any]
    """The row of the dataset, with the columns of the trajectory."""
    step: int
    """The number of optimizer steps made before it was sampled."""
    prompt: Any
    completion: Any
    """For reward functions: text or messages."""
    images: Any = None
    """Those that the policy saw."""
    rewards: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(F,) the reward of each function, NaN where there is none."""
    turn_rewards: dict[int, list[float | None]] = field(default_factory=dict)
    """By reward function index, the reward of each turn, of functions that reward turns."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further columns of TRL's table of completions, logged by reward functions."""


def sample(host: Host, rows: Sequence[dict[str, Any]]) -> list[Sample]:
    """A trajectory for each of this process's rows of the dataset, or for rows that were sampled earlier.

    Raises ValueError for what a rollout returns that does not match.
    """
    rollout, ahead = host.rollout_func, host.ahead if host.is_training else None
    prompts, images = prompts_of(rows)
    step = host.step
    if rollout is None:
        trajectories, completions, images = _of_trl(host, prompts, images)
    else:
        if ahead is not None and ahead.is_running:
            rows, trajectories, step = ahead.next(prompts)
            prompts = [row["prompt"] for row in rows]
        else:
            trajectories = _of_rollout(host, copy.deepcopy(prompts), rows)
        if is_direct(rollout):
            window = positions_of(host.accelerator.unwrap_model(host.model))
            trajectories = closed(trajectories, host.tokenizer.eos_token_id, window)
        _log_lengths(host, trajectories)
        completions = _decoded(host, prompts, trajectories)
    samples = []
    for row, each, *shown in zip(rows, trajectories, prompts, completions, images or [None] * len(rows), strict=True):
        columns = dict(each.columns)
        columns.pop(ROUTES, None)
        shown[:2] = columns.pop(PROMPTS, shown[0]), columns.pop(MESSAGES, shown[1])
        samples.append(Sample(each, {**row, **columns}, step, *shown))
    return samples


def is_direct(rollout: Any) -> bool:
    """Whether a `rollout_func` is a `PolicyRollout`, which may be asked for trajectories instead of TRL's lists."""
    return isinstance(rollout, PolicyRollout) and type(rollout).__call__ is PolicyRollout.__call__


def _of_rollout(host: Host, prompts: list[Any], rows: Sequence[dict[str, Any]]) -> list[Trajectory]:
    """What a `rollout_func` samples with the policy as it is."""
    host.load_engine()
    rollout, trainer = host.rollout_func, host.trainer
    if is_direct(rollout):
        found: list[Trajectory] = rollout.roll_out(prompts, trainer, [dict(row) for row in rows])
        return found
    return read_output(rollout(prompts, trainer), len(prompts))


def _of_trl(host: Host, prompts: list[Any], images: Any) -> tuple[list[Trajectory], list[Any], Any]:
    """What TRL generates, the completions, and the images of each row. TRL logs lengths."""
    prompt_ids, completion_ids, _, completions, logprobs, _, shown, _ = host.generate(prompts)
    lists = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}
    return read_output(lists, len(prompts)), completions, images if shown is None else shown


def _decoded(host: Host, prompts: Sequence[Any], trajectories: Sequence[Trajectory]) -> list[Any]:
    """The completions as TRL decodes them; those with several contexts contain no token twice."""
    texts: list[Any] = host.processing_class.batch_decode(
        [each.shown() for each in trajectories], skip_special_tokens=True
    )
    if not is_conversational({"prompt": prompts[0]}):
        return texts
    tokenizer = host.tokenizer
    reads = any(getattr(tokenizer, f"response_{kind}", None) is not None for kind in ("template", "schema"))
    return [
        [{"role": "assistant", "content": text}]
        if not reads or len(each.shown()) < len(each.completion_ids)
        else [parse_response(tokenizer, each.completion_ids, prefix=[*each.prompt_ids])]
        for each, text in zip(trajectories, texts, strict=True)
    ]


def _log_lengths(host: Host, trajectories: Sequence[Trajectory]) -> None:
    """Log what TRL's `_generate` logs of lengths: of the policy's tokens, over all processes."""
    ends = host.ends
    own = [(len(each.prompt_ids), sum(each.env_mask), each.completion_ids[-1] in ends) for each in trajectories]
    prompts, lengths, ended = host.accelerator.gather(torch.tensor(own, device=host.accelerator.device)).unbind(1)
    logged = host.metrics
    logged["num_tokens"] = [host.count_tokens(int(prompts.sum() + lengths.sum()))]
    logged["completions/clipped_ratio"].append((ended == 0).float().mean().item())
    terminated = lengths[ended.bool()] if ended.any() else lengths.new_zeros(1)
    for name, found in (("length", lengths.float()), ("terminated_length", terminated.float())):
        logged[f"completions/mean_{name}"].append(found.mean().item())
        logged[f"completions/min_{name}"].append(found.min().item())
        logged[f"completions/max_{name}"].append(found.max().item())
