"""Makes one batch of tensors of all trajectories of a rollout, scored by old policy and reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from trl.trainer.utils import nanmax, nanmin, pad, use_adapter

from sorl_trl.methods import ScoredRollout
from sorl_trl.ops import engine_ratio
from sorl_trl.rollout.chat import tabular
from sorl_trl.rollout.routing import packed_routes, replay_gaps
from sorl_trl.trainers.batch import (
    GENERATED_AT,
    drop,
    gather_rows,
    loss_mask_of,
    own_rows,
)
from sorl_trl.trainers.checkpoint import ranks_where
from sorl_trl.trainers.host import Host
from sorl_trl.trainers.prompts import image_inputs
from sorl_trl.trainers.samples import Sample
from sorl_trl.types import Trajectory


@dataclass
class Rollout:
    """One trajectory for each of B dataset rows on this process, and N on all processes, group by group."""

    accelerator: Accelerator
    samples: list[Sample]
    scored: ScoredRollout
    """What all processes know about the N trajectories: the input of credit and `keep`."""
    batch: dict[str, Any]
    """TRL's dictionary of tensors, which training shuffles, splits and reads."""

    def own(self, gathered: Tensor) -> Tensor:
        """The B rows of this process."""
        return own_rows(gathered, len(self.samples), self.accelerator)

    def gather(self, values: Tensor, padding: int = 0) -> Tensor:
        """(B, T) of this process to (N, T) of all processes, with `padding` where a process has fewer columns."""
        return gather_rows(self.accelerator, values, padding)

    def drop(self, keep: Tensor) -> None:
        """Take the trajectories outside `keep`, (B,) bool, out of the loss and its denominators."""
        drop(self.batch, keep, self.accelerator)


def pack(host: Host, samples: list[Sample], scored: ScoredRollout) -> Rollout:
    """The batch of scored trajectories: tensors, images and routes, then a pass of old policy and reference."""
    trajectories = [each.trajectory for each in samples]
    batch = tensors(host, trajectories)
    images = [each.images for each in samples]
    if any(each is not None for each in images):
        batch |= image_inputs(host, [each.prompt for each in samples], images, batch)
    batch[GENERATED_AT] = torch.tensor(samples[0].step)
    routes = _routes(host, batch, trajectories)
    _score_old_policy(host, batch, routes)
    if host.args.beta != 0.0:
        batch["ref_per_token_logps"] = _score_reference(host, batch)
    if host.corrects_engine:
        batch["importance_sampling_ratio"] = engine_weights(host, batch)
    return Rollout(host.accelerator, samples, scored, batch | routes)


def _routes(host: Host, batch: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The field of the batch that has passes of the policy, and no others, replay the engine's routers, if any."""
    if host.forward.routers is None or not host.is_training:
        return {}
    # A completion that is masked because it was cut is not read.
    lengths = (batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)).tolist()
    return packed_routes(trajectories, lengths, host.forward.routers.shape)


def tensors(host: Host, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The part of TRL's batch that sampling alone determines, for the trajectories of this process."""
    pad_id, device = host.tokenizer.pad_token_id, host.accelerator.device

    def padded_tensor(rows: Sequence[Sequence[Any]], value: int, side: str = "right") -> Tensor:
        each = [torch.tensor(row) for row in rows]
        width = host.args.pad_to_multiple_of
        made: Tensor = pad(each, padding_value=value, padding_side=side, pad_to_multiple_of=width)
        return made.to(device)

    prompts, completions = zip(*((each.prompt_ids, each.completion_ids) for each in trajectories), strict=True)
    batch: dict[str, Any] = {
        "prompt_ids": padded_tensor(prompts, pad_id, "left"),
        "prompt_mask": padded_tensor([[1] * len(row) for row in prompts], 0, "left"),
        "completion_ids": padded_tensor(completions, pad_id),
        "completion_mask": padded_tensor([[1] * len(row) for row in completions], 0),
        "tool_mask": padded_tensor([each.env_mask for each in trajectories], 1),
    }
    logprobs = [row for each in trajectories if (row := each.logprobs) is not None]
    if len(logprobs) == len(trajectories):
        batch["sampling_per_token_logps"] = padded_tensor(logprobs, 0)
    if any(any(each.context_ids) for each in trajectories):
        batch["context_ids"] = padded_tensor([each.context_ids for each in trajectories], 0)
    if host.args.mask_truncated_completions:
        ends = host.ends
        is_whole = torch.tensor([[row[-1] in ends] for row in completions], device=device).int()
        for name in ("completion_mask", "tool_mask"):
            batch[name] = batch[name] * is_whole
    turn_ids = padded_tensor([each.turn_ids for each in trajectories], -1)
    batch["turn_ids"] = torch.where(loss_mask_of(batch).bool(), turn_ids, -1)
    batch["num_items_in_batch"] = host.accelerator.gather(loss_mask_of(batch).sum()).sum()
    return batch


# -------------------------------------------------------------------------------------------------------------------
# Old policy and engine
# -------------------------------------------------------------------------------------------------------------------


def _score_old_policy(host: Host, batch: dict[str, Any], routes: dict[str, Any]) -> None:
    """Put the log-probabilities that ratios compare with into a batch, and the values of a critic.

    Without them, ratios compare the policy with itself, as in TRL. No pass is made if ratios compare with the
    asynchronous sampling policy and all of its log-probabilities are known.
    """
    is_sampler = host.args.async_staleness > 0 and host.is_training
    is_reused = host.args.gradient_accumulation_steps % host.args.cycle_steps != 0
    is_compared = is_sampler or is_reused or host.corrects_engine
    sampling: Any = batch.get("sampling_per_token_logps")
    is_known = is_sampler and not ranks_where(bool(sampling.isnan().any()))
    logps = None
    if host.has_critic or (is_compared and not is_known):
        scores = host.score(host.model, batch | routes, values=host.has_critic)
        logps = scores.logps
        if routes:
            live = (lambda: host.score(host.model, batch).logps) if host.args.log_turn_details else None
            for figure in replay_gaps(batch, logps, live):
                host.log_mean(*figure)
        if scores.values is not None:
            batch["old_values"] = scores.values
    if is_compared:
        old: Any = sampling if is_known else logps
        batch["old_per_token_logps"] = torch.where(sampling.isnan(), old, sampling) if is_sampler else old


def _score_reference(host: Host, batch: dict[str, Any]) -> Tensor:
    """(B, T) log-probabilities of the reference: a separate model, or the policy without its adapter."""
    if host.reference_model is not None:
        return host.score(host.reference_model, batch).logps
    policy = host.accelerator.unwrap_model(host.model)
    with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
        return host.score(host.model, batch).logps


def engine_weights(host: Host, batch: Mapping[str, Any]) -> Tensor:
    """TRL's weights π_old/μ of tokens (B, T) or sequences (B, 1), and their metrics."""
    args, mask = host.args, loss_mask_of(batch).bool()
    mode = args.vllm_importance_sampling_mode
    bounds = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    difference = batch["old_per_token_logps"] - batch["sampling_per_token_logps"]
    ratio = engine_ratio(difference, mask, mode, *bounds)
    gather, zero = host.accelerator.gather, difference.new_zeros(())
    logged = host.metrics
    known = difference[mask & ~difference.isnan()].abs()
    mean, largest = (known.mean(), known.max()) if known.numel() else (zero, zero)
    logged["sampling/sampling_logp_difference/mean"].append(gather(mean).mean().item())
    logged["sampling/sampling_logp_difference/max"].append(gather(largest).max().item())
    shown = ratio.flatten() if mode.startswith("sequence") else ratio[mask]
    low, mean, high = (shown.min(), shown.mean(), shown.max()) if shown.numel() else (zero, zero, zero)
    logged["sampling/importance_sampling_ratio/min"].append(nanmin(gather(low)).item())
    logged["sampling/importance_sampling_ratio/mean"].append(gather(mean).nanmean().item())
    logged["sampling/importance_sampling_ratio/max"].append(nanmax(gather(high)).item())
    return ratio


def kept(host: Host, rollout: Rollout) -> Tensor:
    """(B,) bool, which of this process's trajectories all pieces of `keep` keep. The share of each is logged."""
    found = torch.ones_like(rollout.scored.scored)
    for piece in host.method.keep:
        keep = piece(rollout.scored).bool()
        name = getattr(piece, "__name__", type(piece).__name__)
        host.metrics[f"keep/{name}"].append(keep.float().mean().item())
        found = found & keep
    own: Tensor = rollout.own(found)
    return own


def log_table(host: Host, rollout: Rollout, advantages: Tensor) -> None:
    """Put the rollout into TRL's table of completions, with (N,) advantages. Processes share the order of names."""
    logs = host.table
    logs["prompt"].extend(gather_object([each.prompt for each in rollout.samples]))
    logs["completion"].extend(gather_object([tabular(each.completion) for each in rollout.samples]))
    for i, name in enumerate(rollout.scored.reward_names):
        logs["rewards"][name].extend(rollout.scored.rewards_per_func[:, i].tolist())
    for name in sorted({*gather_object([*{name for each in rollout.samples for name in each.extra}])}):
        logs["extra"][name].extend(gather_object([each.extra.get(name) for each in rollout.samples]))
    logs["advantages"].extend(advantages.tolist())
    images = [each.images for each in rollout.samples]
    if host.args.log_multimodal and any(each is not None for each in images):
        logs["images"].extend(gather_object(images))
