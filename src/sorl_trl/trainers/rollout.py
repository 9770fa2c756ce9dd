"""Builds a rollout: this process's trajectories, what all processes share about them, and the batch's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.functional import pad as pad_width
from trl.trainer.utils import nanmax, nanmin, nanstd, pad, use_adapter

from sorl_trl.methods import GroupMean, ScoredRollout
from sorl_trl.ops import bounded_log_ratio, engine_ratio, turn_layout
from sorl_trl.records.resume_point import ranks_where
from sorl_trl.rollout.chat import tabular
from sorl_trl.rollout.engines.base import positions_of
from sorl_trl.rollout.policy_rollout import MESSAGES, PROMPTS
from sorl_trl.trainers.agents import agent_fields, agents_of_all, log_agents, names_of
from sorl_trl.trainers.batch import (
    GENERATED_AT,
    OLD_POLICY_STEP,
    drop,
    gather_rows,
    loss_mask_of,
    own_rows,
    token_count,
)
from sorl_trl.trainers.checks import check_names
from sorl_trl.trainers.host import Host
from sorl_trl.trainers.prompts import image_inputs, prompts_of
from sorl_trl.trainers.rewards import SAMPLED, scorable, split_rewards
from sorl_trl.trainers.router_replay import ROUTES, engine_routes, log_gaps
from sorl_trl.trainers.sampled import Sampled, name_agents, padded, sampled_rows, state_keys


@dataclass
class Rollout:
    """One trajectory for each of B dataset rows on this process, and N on all processes, group by group."""

    accelerator: Accelerator
    rows: list[dict[str, Any]]
    """The rows of the dataset, with the columns that the rollout added."""
    sampled: list[Sampled]
    """The trajectories as they were sampled."""
    batch: dict[str, Any]
    """TRL's dictionary of tensors, which training shuffles, splits and reads."""
    scored: ScoredRollout
    """What all processes know about the N trajectories: the input of credit and `keep`."""
    prompts: list[Any]
    completions: list[Any]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Further columns of TRL's table of completions, logged by reward functions."""
    old_logps: Tensor | None = None
    """(B, T) log-probabilities of the policy as training on the rollout begins, if a pass was made."""

    def own(self, gathered: Tensor) -> Tensor:
        """The B rows of this process."""
        return own_rows(gathered, len(self.rows), self.accelerator)

    def gather(self, values: Tensor, padding: int = 0) -> Tensor:
        """(B, T) of this process to (N, T) of all processes, with `padding` where a process has fewer columns."""
        return gather_rows(self.accelerator, values, padding)

    def drop(self, keep: Tensor) -> None:
        """Take everything outside `keep`, (B,) or (B, T) bool, out of the loss and its denominators."""
        drop(self.batch, keep, self.accelerator)


def collect(host: Host, inputs: list[dict[str, Any]]) -> Rollout:
    """Generate, score and reward a trajectory for each of this process's rows of the dataset."""
    check_names(host.trainer, "The dataset", inputs[0])  # those of a stream are known only now

    # Generate. TRL calls `rollout_func` or its engine, and logs lengths.
    prompts, images = prompts_of(inputs)
    host.trainer.rollout_examples = [dict(row) for row in inputs]
    if host.ahead is not None:
        host.ahead.renew(prompts)
    prompt_ids, completion_ids, env_mask, completions, logprobs, columns, shown, _ = host.generate(prompts)
    images = images if shown is None else shown
    sampled_at, rows = host.step, inputs
    if host.ahead is not None:  # other rows may have been overtaken
        sampled_at, rows = columns.pop("sampled_at_step"), columns.pop("rows")
        prompts = [row["prompt"] for row in rows]
    prompts = columns.pop(PROMPTS, prompts)
    context_ids = columns.pop("context_ids", None)
    window = None if context_ids is None else positions_of(host.accelerator.unwrap_model(host.model))
    turn_ids = columns.pop("turn_ids", None)
    sampled = sampled_rows(prompt_ids, completion_ids, env_mask, turn_ids, context_ids, window)
    name_agents(sampled, columns.get("agents"))
    completions = columns.pop(MESSAGES, None) or _shown(host, completions, sampled)

    # Old policy and reference policy
    batch = tensors(host, sampled, env_mask, logprobs, context_ids is not None)
    batch |= agent_fields(sampled, batch["turn_ids"])
    batch |= image_inputs(host.trainer, prompts, images, batch)
    batch[GENERATED_AT] = torch.tensor(sampled_at)
    given_routes = columns.pop("routes", None)
    if host.args.router_replay != "none" and host.is_training:
        batch[ROUTES] = engine_routes(batch, sampled, given_routes, host.forward.routers.shape)
    compares_with_sampler = host.args.compares_with_sampler
    batch[OLD_POLICY_STEP] = torch.tensor(sampled_at if compares_with_sampler else host.step)
    old_logps = _score_old_policy(host, batch)
    if host.reference_beta != 0.0:
        batch["ref_per_token_logps"] = _score_reference(host, batch)
    if host.corrects_engine:
        batch["importance_sampling_ratio"] = engine_weights(host, batch)

    # Rewards, which functions may give to turns
    rows = [{**row, **_added(columns, i)} for i, row in enumerate(rows)]
    asked = [{**row, SAMPLED: own} for row, own in zip(rows, sampled, strict=True)]
    rewards = scorable(host, sampled, host.rewards_of(asked, prompts, completions, completion_ids))
    scored = scored_rollout(host, sampled, batch, rewards)
    log_rewards(host, scored)
    log_agents(host.metrics, scored)
    extra = host.taken_columns()
    log_pending_metrics(host)
    if images is not None and host.logs_images:
        host.table["images"].extend(gather_object(images))
    return Rollout(host.accelerator, rows, sampled, batch, scored, prompts, completions, extra, old_logps)


def _added(columns: Mapping[str, Any], i: int) -> dict[str, Any]:
    """What a rollout adds to its row `i`; what is no list belongs to all rows."""
    return {name: values[i] if isinstance(values, list) else values for name, values in columns.items()}


def _shown(host: Host, completions: list[Any], sampled: Sequence[Sampled]) -> list[Any]:
    """The completions for reward functions; those with several contexts contain no token twice."""
    for i, row in enumerate(sampled):
        if any(context < 0 for context in row.context_ids):
            text = host.tokenizer.decode(row.shown(0, len(row.completion_ids)), skip_special_tokens=True)
            is_text = isinstance(completions[i], str)
            completions[i] = text if is_text else [{"role": "assistant", "content": text}]
    return completions


# -------------------------------------------------------------------------------------------------------------------
# From lists to tensors
# -------------------------------------------------------------------------------------------------------------------


def tensors(
    host: Host,
    sampled: Sequence[Sampled],
    env_mask: Sequence[Sequence[int]] | None,
    logprobs: Sequence[Sequence[float | None]] | None,
    has_contexts: bool,
) -> dict[str, Any]:
    """The part of TRL's batch that sampling alone determines, for the trajectories of this process."""
    pad_id, accelerator, ends = host.tokenizer.pad_token_id, host.accelerator, host.ends

    def padded_tensor(rows: Sequence[Sequence[Any]], value: int, side: str = "right") -> Tensor:
        each = [torch.tensor(row) for row in rows]
        width = host.pad_to_multiple_of
        made: Tensor = pad(each, padding_value=value, padding_side=side, pad_to_multiple_of=width)
        return made.to(accelerator.device)

    prompts, completions = [row.prompt_ids for row in sampled], [row.completion_ids for row in sampled]
    batch: dict[str, Any] = {
        "prompt_ids": padded_tensor(prompts, pad_id, "left"),
        "prompt_mask": padded_tensor([[1] * len(row) for row in prompts], 0, "left"),
        "completion_ids": padded_tensor(completions, pad_id),
        "completion_mask": padded_tensor([[1] * len(row) for row in completions], 0),
    }
    if env_mask is not None:
        batch["tool_mask"] = padded_tensor(env_mask, 1)
    if logprobs is not None:  # vLLM gives None for a token that it could not score
        known = [[float("nan") if each is None else each for each in row] for row in logprobs]
        batch["sampling_per_token_logps"] = padded_tensor(known, 0)
    if has_contexts:
        batch["context_ids"] = padded_tensor([row.context_ids for row in sampled], 0)
    if ends is not None:
        is_whole = torch.tensor([[row[-1] in ends] for row in completions], device=accelerator.device).int()
        for name in {"completion_mask", "tool_mask"} & batch.keys():
            batch[name] = batch[name] * is_whole
    turn_ids = padded_tensor([row.turn_ids for row in sampled], -1)
    batch["turn_ids"] = torch.where(loss_mask_of(batch).bool(), turn_ids, -1)
    batch["num_items_in_batch"] = token_count(batch, accelerator)
    return batch


# -------------------------------------------------------------------------------------------------------------------
# Old policy and engine
# -------------------------------------------------------------------------------------------------------------------


def _score_old_policy(host: Host, batch: dict[str, Any]) -> Tensor | None:
    """Put the log-probabilities that ratios compare with into a batch; return the policy's, if a pass was made.

    Without them, ratios compare the policy with itself, as in TRL. No pass is made if ratios compare with the
    asynchronous sampling policy and all of its log-probabilities are known.
    """
    is_ahead = host.args.async_staleness > 0 and host.is_training
    is_sampler = is_ahead and host.args.compares_with_sampler
    is_reused = host.args.gradient_accumulation_steps % host.args.cycle_steps != 0
    is_compared = is_ahead or is_reused or host.corrects_engine
    sampling: Any = batch.get("sampling_per_token_logps")
    is_known = is_sampler and not ranks_where(bool(sampling.isnan().any()))
    logps = None
    if host.has_critic or (is_compared and not is_known):
        scores = host.score(host.model, batch, values=host.has_critic, replay=True)
        logps = scores.logps
        if ROUTES in batch:
            log_gaps(host, batch, logps)
        if scores.values is not None:
            batch["old_values"] = scores.values
    if is_compared:
        old: Any = sampling if is_known else logps
        batch["old_per_token_logps"] = torch.where(sampling.isnan(), old, sampling) if is_sampler else old
    return logps


def _score_reference(host: Host, batch: dict[str, Any]) -> Tensor:
    """(B, T) log-probabilities of the reference: a separate model, or the policy without its adapter."""
    if host.reference_model is not None:
        return host.score(host.reference_model, batch).logps
    policy = host.accelerator.unwrap_model(host.model)
    with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
        return host.score(host.model, batch).logps


def mismatch_of(batch: Mapping[str, Any], turn_ids: Tensor) -> Tensor:
    """(B, T) d_t = log π_old − log μ of each model token, bounded; 0 where it is NaN and outside model tokens.

    An appended end-of-sequence token is not a model token, because the engine did not sample it.
    """
    width = turn_ids.size(1)
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[:, :width]
    known = (turn_ids >= 0) & ~difference.isnan()
    return bounded_log_ratio(torch.where(known, difference, 0.0))


def engine_weights(host: Host, batch: Mapping[str, Any]) -> Tensor:
    """TRL's weights π_old/μ of tokens (B, T) or sequences (B, 1), and their metrics."""
    (mode, *bounds), mask = host.engine_ratio_mode, loss_mask_of(batch).bool()
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


# -------------------------------------------------------------------------------------------------------------------
# Rewards
# -------------------------------------------------------------------------------------------------------------------


def scored_rollout(
    host: Host,
    sampled: Sequence[Sampled],
    batch: Mapping[str, Any],
    rewards_per_func: Tensor,
) -> ScoredRollout:
    """What all processes know about the N trajectories, from this process's B and the (N, F) rewards of all."""
    accelerator = host.accelerator
    weights = host.reward_weights.to(rewards_per_func.device)
    turns = turn_layout(padded([row.turn_ids for row in sampled], -1).to(accelerator.device))
    own_rewards = own_rows(rewards_per_func, len(sampled), accelerator)
    split = split_rewards(sampled, own_rewards, weights, turns.num_turns)
    states = state_keys(sampled, turns.num_turns).to(accelerator.device)
    return ScoredRollout(
        turns=turn_layout(gather_rows(accelerator, turns.turn_ids, padding=-1)),
        rewards_per_func=rewards_per_func,
        reward_names=host.reward_names,
        reward_weights=weights,
        turn_rewards=gather_rows(accelerator, split.turn_rewards),
        has_turn_reward=gather_rows(accelerator, split.has_turn_reward),
        outcomes=accelerator.gather(split.outcomes),
        has_outcome=accelerator.gather(split.has_outcome),
        states=gather_rows(accelerator, states),
        num_generations=host.group_size,
        gamma=host.method.gamma,
        **agents_of_all(accelerator, sampled, names_of(batch)),
    )


def log_rewards(host: Host, scored: ScoredRollout) -> None:
    """Log what TRL logs of rewards."""
    per_func, totals, logged = scored.rewards_per_func, scored.totals(), host.metrics
    credit = host.method.credit
    _, std = (credit if isinstance(credit, GroupMean) else GroupMean()).of_outcomes(scored)
    for i, name in enumerate(scored.reward_names):
        logged[f"rewards/{name}/mean"].append(per_func[:, i].nanmean().item())
        logged[f"rewards/{name}/std"].append(nanstd(per_func[:, i]).item())
    logged["reward"].append(totals.nanmean().item())
    logged["reward_std"].append(nanstd(totals).item())
    logged["frac_reward_zero_std"].append(torch.isclose(std, torch.zeros_like(std)).float().mean().item())


# -------------------------------------------------------------------------------------------------------------------
# Keep
# -------------------------------------------------------------------------------------------------------------------


def kept_masks(host: Host, rollout: Rollout) -> list[Tensor]:
    """What each piece of `keep` keeps of this process's rows, (B,) or (B, T) bool. The shares are logged.

    T is the padded width of the batch.
    """
    masks = []
    width = rollout.batch["completion_ids"].size(1)
    for piece in host.method.keep:
        keep = piece(rollout.scored).bool()
        name = getattr(piece, "__name__", type(piece).__name__)
        share = keep if keep.dim() == 1 else keep[rollout.scored.turns.loss_mask]
        host.metrics[f"keep/{name}"].append(share.float().mean().item())
        own = rollout.own(keep)
        if own.dim() == 2:
            own = pad_width(own[:, :width], (0, max(width - own.size(1), 0)), value=True)
        masks.append(own)
    return masks


# -------------------------------------------------------------------------------------------------------------------
# What TRL logs
# -------------------------------------------------------------------------------------------------------------------


def log_pending_metrics(host: Host) -> None:
    """Log the means over all processes of what `_log_metric` recorded, in an order that all share."""
    logged, accelerator, pending = host.metrics, host.accelerator, host.taken_metrics()
    for name in sorted({*gather_object(list(pending))}):
        values = pending.get(name, [])
        sums = torch.tensor([sum(values), len(values)], dtype=torch.float32, device=accelerator.device)
        total, count = accelerator.gather(sums).view(-1, 2).sum(0).tolist()
        logged[name].append(total / count)


def log_table(host: Host, rollout: Rollout, advantages: Tensor) -> None:
    """Put the rollout into TRL's table of completions, with (N,) advantages. Processes share the order of names."""
    logs = host.table
    logs["prompt"].extend(gather_object(list(rollout.prompts)))
    logs["completion"].extend(gather_object([*map(tabular, rollout.completions)]))
    for i, name in enumerate(rollout.scored.reward_names):
        logs["rewards"][name].extend(rollout.scored.rewards_per_func[:, i].tolist())
    for name in sorted({*gather_object(list(rollout.extra))}):
        logs["extra"][name].extend(gather_object(rollout.extra.get(name, [None] * len(rollout.rows))))
    logs["advantages"].extend(advantages.tolist())
