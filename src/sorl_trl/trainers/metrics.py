"""The metrics that a turn-level loss logs once per optimizer step; docs/metrics.md explains every name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad

from sorl_trl.methods import MicroBatch, Objective
from sorl_trl.ops import (
    effective_sample_size,
    importance_ratio,
    is_outside,
    kl_to_old,
    masked_mean,
    range_of_turns,
    turn_reduce,
    weight_sums,
)
from sorl_trl.trainers.loss import SURROGATES, unit_values
from sorl_trl.types import StopReason

DETAILS = (
    *("turns/length", "turns/ratio_mean", "turns/ratio_min", "clip_fraction/", "clip_penalty_gate", "critic/turn_"),
    *("effective_sample_size", "effective_sample_size/"),
    *("rollout/turns_", "rollout/neutralized_", "rollout/masked_", "rollout/tokens_per_turn", "rollout/truncated_"),
    *("rollout/tokens_per_observation", "rollout/unique_", "rollout/passages_", "rollout/empty_", "rollout/seconds_"),
    *(f"rollout/stop_reason/{reason.value}" for reason in StopReason if reason is not StopReason.ANSWERED),
)
"""Metrics that only `log_turn_details` logs: a name, or the beginning of a family's names, up to "/" or "_"."""
ON_POLICY_CONSTANTS = ("off_policy_age", "clip_penalty", "lr_factor")
"""Metrics that are constant if each rollout serves one update."""


class MetricSums:
    """Means and extremes of one micro-batch, and its share in effective sample sizes, to be reduced over processes."""

    def __init__(self) -> None:
        self.means: dict[str, tuple[Tensor, Tensor]] = {}
        self.minima: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}

    def add_mean(self, name: str, values: Tensor, keep: Tensor) -> None:
        """Add the mean of `values` where `keep` is true, of the same shape. Processes with more values count more."""
        keep = keep.bool()
        self.means[name] = (torch.where(keep, values.detach(), 0.0).sum().float(), keep.sum().float())

    def add(self, metrics: Mapping[str, Tensor | tuple[Tensor, Tensor]]) -> None:
        """Add several means: pairs of values and where to keep them, or one scalar (or NaN) per process."""
        for name, value in metrics.items():
            self.add_mean(name, *(value if isinstance(value, tuple) else (value, ~value.isnan())))

    def add_weights(self, name: str, ratio: Tensor, keep: Tensor) -> None:
        """Add the importance ratios where `keep` is true to an effective sample size of all micro-batches together."""
        self.weights[name] = weight_sums(ratio.detach(), keep).float()

    def add_min(self, name: str, values: Tensor, keep: Tensor) -> None:
        """Add the minimum of `values` where `keep` is true."""
        self.minima[name] = _least(values.detach(), keep)

    def add_max(self, name: str, values: Tensor, keep: Tensor) -> None:
        """Add the maximum of `values` where `keep` is true."""
        self.maxima[name] = -_least(-values.detach(), keep)

    def row(self) -> Tensor:
        """(N,) the numbers of this process that other processes need."""
        pairs = [number for pair in self.means.values() for number in pair]
        single = torch.stack([*pairs, *self.minima.values(), *self.maxima.values()])
        return torch.cat([single, *self.weights.values()])

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """Every metric over all processes. It is NaN, which TRL's averages skip, if nothing was kept."""
        return reduce_all([self], accelerator)[0]


def reduce_all(sums: Sequence[MetricSums], accelerator: Accelerator) -> list[dict[str, float]]:
    """The metrics of each micro-batch over all processes, in one collective and one wait for the device.

    The last one also has the effective sample sizes of all of them together. All processes and micro-batches must have
    the same metrics.
    """
    first = sums[0]
    means, minima, maxima, weights = first.means, first.minima, first.maxima, first.weights
    rows = accelerator.gather(torch.stack([each.row() for each in sums]).unsqueeze(0)).cpu()
    pairs, lows, highs, shares = rows.split([2 * len(means), len(minima), len(maxima), 3 * len(weights)], dim=-1)
    totals, low, high = pairs.sum(0), lows.amin(0), highs.amax(0)
    values = [totals[:, ::2] / totals[:, 1::2], low.masked_fill(low == math.inf, math.nan)]  # 0 / 0 is NaN
    values.append(high.masked_fill(high == -math.inf, math.nan))
    found = [dict(zip([*means, *minima, *maxima], row, strict=True)) for row in torch.cat(values, dim=-1).tolist()]
    sizes = map(effective_sample_size, shares.sum((0, 1)).view(-1, 3))
    found[-1] |= {name: size.item() for name, size in zip(weights, sizes, strict=True)}
    return found


def _least(values: Tensor, keep: Tensor) -> Tensor:
    """() the minimum of the values to keep; infinity if there are none."""
    return pad(torch.where(keep.bool(), values, math.inf).flatten(), (0, 1), value=math.inf).min().float()


def mean_kl(metrics: Iterable[tuple[Mapping[str, float], bool]]) -> float:
    """The mean KL to the old policy over the micro-batches in which the policy had moved; NaN without one.

    Before the policy has moved, the KL is only rounding. A micro-batch without a token has none.
    """
    kls = [each["kl_to_old"] for each, has_moved in metrics if has_moved]
    known = [kl for kl in kls if not math.isnan(kl)]
    return sum(known) / len(known) if known else math.nan


class MetricLog:
    """Adds a value per metric and micro-batch to TRL's lists, as TRL does.

    Values stay on the device until the optimizer steps. Then all processes exchange them, and each waits for its
    device once, however many micro-batches there were.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._waiting: list[tuple[MetricSums, bool]] = []
        """Those of each micro-batch since the last step, and whether the policy had moved."""

    def shorten(self, mode: str) -> None:
        """Remove the metrics that are not to be logged."""
        args, metrics = self._trainer.args, self._trainer._metrics[mode]
        left_out = () if args.log_turn_details else DETAILS + ON_POLICY_CONSTANTS * args.is_on_policy
        families = tuple(name for name in left_out if name.endswith(("/", "_")))
        for name in [name for name in metrics if name in left_out or name.startswith(families)]:
            del metrics[name]

    def observe(self, batch: MicroBatch, objective: Objective, others: Mapping[str, Any]) -> float:
        """Observe a micro-batch. If the optimizer steps after it, log all metrics since the last step.

        `others` are metrics of the loss and its terms, in the form of `MetricSums.add`. Returns the `mean_kl` of an
        update that is complete, else NaN.
        """
        sums = batch_metrics(batch)
        if self._trainer.args.loss_type not in SURROGATES:  # which stop no gradient
            add_clip_ratios(sums, batch, objective.stopped)
        sums.add(others)
        self._waiting.append((sums, batch.has_moved))
        logged = self._trainer._metrics["train" if batch.is_training else "eval"]
        if batch.age is not None:
            logged["off_policy_age"].append(batch.age)
        if not batch.ends_step:
            return math.nan
        waiting, has_moved = zip(*self._waiting, strict=True)
        self._waiting.clear()
        reduced = reduce_all(waiting, self._trainer.accelerator)
        for name, value in (item for metrics in reduced for item in metrics.items()):
            logged[name].append(value)
        return mean_kl(zip(reduced, has_moved, strict=True))


@torch.no_grad()
def batch_metrics(batch: MicroBatch) -> MetricSums:
    """The turn, ratio, clip and KL metrics of one micro-batch."""
    turns, log_ratio = batch.turns, batch.log_ratio.detach()
    low, high = (range_of_turns(side, turns) for side in batch.turn_range[:2])
    present = turns.turn_mask
    ratio = turn_reduce(importance_ratio(log_ratio, turns, "turn", batch.turn_ratio), turns)
    turn_advantages = turn_reduce(batch.advantages.expand_as(log_ratio), turns)
    outside_tokens = is_outside(log_ratio.float().exp(), *batch.token_range[:2])
    sums = MetricSums()
    sums.add_mean("turns/per_trajectory", present.float().sum(-1), torch.ones_like(turns.counts))
    sums.add_mean("turns/length", turns.lengths.float(), present)
    sums.add_mean("turns/ratio_mean", ratio, present)
    sums.add_min("turns/ratio_min", ratio, present)
    sums.add_max("turns/ratio_max", ratio, present)
    sums.add_mean("clip_fraction/token", outside_tokens.float(), turns.loss_mask)
    sums.add_mean("clip_fraction/turn", is_outside(ratio, low, high).float(), present)
    is_negative = present & (turn_advantages < 0)
    sums.add_mean("clip_fraction/negative_turn", is_outside(ratio, low, math.inf).float(), is_negative)
    sums.add_mean("kl_to_old", kl_to_old(log_ratio, turns.loss_mask, "unbiased"), turns.counts > 0)
    sums.add_weights("effective_sample_size", batch.ratio, turns.loss_mask)
    sums.add_weights("effective_sample_size/token", log_ratio.exp(), turns.loss_mask)
    if batch.level == "sequence":
        ratios = importance_ratio(log_ratio, turns, "sequence", batch.turn_ratio)
        outside = masked_mean(is_outside(ratios, *batch.clip_range[:2]).float(), turns.loss_mask, dim=1)
        sums.add_mean("clip_fraction/sequence", outside, turns.counts > 0)
    return sums


@torch.no_grad()
def add_clip_ratios(sums: MetricSums, batch: MicroBatch, stopped: Tensor) -> None:
    """TRL's `clip_ratio/…`: the share of tokens whose gradient is stopped, (B, T) bool, on either side of 1.

    At the sequence level it is, as in TRL, the share of trajectories.
    """
    above = batch.ratio.detach() > 1
    low, high = (stopped & ~above).float(), (stopped & above).float()
    sums.add_mean("clip_ratio/low_mean", *unit_values(low, batch))
    sums.add_mean("clip_ratio/high_mean", *unit_values(high, batch))
    sums.add_mean("clip_ratio/region_mean", *unit_values(low + high, batch))
    sums.add_min("clip_ratio/low_min", masked_mean(low, batch.loss_mask, dim=1), batch.turns.counts > 0)
    sums.add_max("clip_ratio/high_max", masked_mean(high, batch.loss_mask, dim=1), batch.turns.counts > 0)
