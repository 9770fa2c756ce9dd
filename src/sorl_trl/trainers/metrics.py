"""The metrics that a turn-level loss logs once per optimizer step; docs/metrics.md explains every name."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

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
from sorl_trl.trainers.loss import SURROGATES, of_units
from sorl_trl.types import StopReason

logger = logging.getLogger(__name__)

DETAILS = (
    *("turns/length", "turns/ratio_mean", "turns/ratio_min", "clip_fraction/", "clip_penalty_gate", "critic/turn_"),
    *("effective_sample_size", "effective_sample_size/"),
    *(
        f"rollout/{name}"
        for name in ("turns_", "neutralized_", "masked_", "tokens_per_turn", "tokens_per_observation")
    ),
    *(f"rollout/{name}" for name in ("truncated_", "unique_", "passages_", "empty_", "seconds_")),
    *(f"rollout/stop_reason/{reason.value}" for reason in StopReason if reason is not StopReason.ANSWERED),
)
"""Metrics that only `log_turn_details` logs: a name, or the beginning of a family's names, up to "/" or "_"."""
ON_POLICY_CONSTANTS = ("off_policy_age", "clip_penalty", "lr_factor")
"""Metrics that are constant if each rollout serves one update."""
ROUNDED_KL = 1e-3
"""A KL to the old policy, in nats per token, that rounding stays below while the policy has not moved. Ours."""


class MetricSums:
    """Means and extremes of one micro-batch, and its share in effective sample sizes, to be reduced over processes."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[Tensor, Tensor]] = {}
        self._weights: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._minima: dict[str, Tensor] = {}

    def add_mean(self, name: str, values: Tensor, keep: Tensor) -> None:
        """Add the mean of `values` where `keep` is true, of the same shape. Processes with more values count more."""
        keep = keep.bool()
        self._means[name] = (torch.where(keep, values.detach(), 0.0).sum().float(), keep.sum().float())

    def add(self, metrics: Mapping[str, Tensor | tuple[Tensor, Tensor]]) -> None:
        """Add several means: pairs of values and where to keep them, or one scalar (or NaN) per process."""
        for name, value in metrics.items():
            self.add_mean(name, *(value if isinstance(value, tuple) else (value, ~value.isnan())))

    def add_weights(self, name: str, ratio: Tensor, keep: Tensor) -> None:
        """Add the importance ratios where `keep` is true to an effective sample size of all micro-batches together."""
        self._weights[name] = weight_sums(ratio.detach(), keep).float()

    def add_min(self, name: str, values: Tensor, keep: Tensor) -> None:
        """Add the minimum of `values` where `keep` is true."""
        self._minima[name] = _amin(torch.where(keep.bool(), values.detach(), float("inf")))

    def add_max(self, name: str, values: Tensor, keep: Tensor) -> None:
        """Add the maximum of `values` where `keep` is true."""
        self._maxima[name] = -_amin(torch.where(keep.bool(), -values.detach(), float("inf")))

    @property
    def names(self) -> list[str]:
        """The names of the metrics that each micro-batch has, in the order of `_reduced`'s values."""
        return [*self._means, *self._minima, *self._maxima]

    def row(self) -> Tensor:
        """(N,) the numbers of this process that other processes need."""
        pairs = [number for pair in self._means.values() for number in pair]
        extremes = [-low for low in self._minima.values()] + list(self._maxima.values())
        return torch.cat([torch.stack([*pairs, *extremes]), *self._weights.values()])

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """Every metric over all processes. It is NaN, which TRL's averages skip, if nothing was kept."""
        return reduce_all([self], accelerator)[0]

    def _weights_of(self, rows: Tensor) -> dict[str, Tensor]:
        """(R, M, N) the rows of R processes and M micro-batches to the sums of the weights in all of them."""
        weights = rows[..., rows.size(-1) - 3 * len(self._weights) :].sum((0, 1)).view(-1, 3)
        return dict(zip(self._weights, weights, strict=True))

    def _reduced(self, rows: Tensor) -> Tensor:
        """(R, M, N) the rows of R processes and M micro-batches to (M, len(names)) metrics."""
        pairs, extremes, _ = rows.tensor_split([2 * len(self._means), rows.size(-1) - 3 * len(self._weights)], dim=-1)
        sums = pairs.sum(0).view(pairs.shape[1], -1, 2)
        tops = extremes.amax(0)
        tops = torch.where(tops == -float("inf"), float("nan"), tops)
        lows, highs = -tops[:, : len(self._minima)], tops[:, len(self._minima) :]
        # 0 / 0 is NaN
        return torch.cat([sums[..., 0] / sums[..., 1], lows, highs], dim=-1)


def reduce_all(sums: Sequence[MetricSums], accelerator: Accelerator) -> list[dict[str, float]]:
    """The metrics of each micro-batch over all processes, in one collective and one wait for the device.

    The last one also has the effective sample sizes of all of them together. All processes and micro-batches must have
    the same metrics.
    """
    first = sums[0]
    rows = accelerator.gather(torch.stack([each.row() for each in sums]).unsqueeze(0)).cpu()
    found = [dict(zip(first.names, values, strict=True)) for values in first._reduced(rows).tolist()]
    found[-1] |= {name: effective_sample_size(each).item() for name, each in first._weights_of(rows).items()}
    return found


def mean_of_numbers(values: Sequence[float]) -> float:
    """The mean of the values that are not NaN; NaN if there are none."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan


class MetricLog:
    """Adds a value per metric and micro-batch to TRL's lists, as TRL does.

    Values stay on the device until the optimizer steps. Then all processes exchange them, and each waits for its
    device once, however many micro-batches there were.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._waiting: list[MetricSums] = []
        self._is_old: list[bool] = []
        """For each of them, whether the policy still is the old policy, both as the trainer computes them."""
        self._has_warned = False

    def shorten(self, mode: str) -> None:
        """Remove the metrics that are not to be logged."""
        args, metrics = self._trainer.args, self._trainer._metrics[mode]
        left_out = () if args.log_turn_details else DETAILS + ON_POLICY_CONSTANTS * args.is_on_policy
        families = tuple(name for name in left_out if name.endswith(("/", "_")))
        for name in [name for name in metrics if name in left_out or name.startswith(families)]:
            del metrics[name]

    def observe(self, batch: MicroBatch, objective: Objective, others: Mapping[str, Any]) -> list[dict[str, float]]:
        """Observe a micro-batch. If the optimizer steps after it, log and return all metrics since the last step.

        `others` are metrics of the loss and its terms, in the form of `MetricSums.add`.
        """
        sums = batch_metrics(batch)
        if self._trainer.args.loss_type not in SURROGATES:  # which stop no gradient
            add_clip_ratios(sums, batch, objective.stopped)
        sums.add(others)
        self._waiting.append(sums)
        self._is_old.append(batch.is_training and not (batch.has_moved or self._trainer.args.compares_with_sampler))
        logged = self._trainer._metrics["train" if batch.is_training else "eval"]
        if batch.age is not None:
            logged["off_policy_age"].append(batch.age)
        if not batch.ends_step:
            return []
        reduced = reduce_all(self._waiting, self._trainer.accelerator)
        for name, value in (item for metrics in reduced for item in metrics.items()):
            logged[name].append(value)
        self._warn_of_noise([each for each, is_old in zip(reduced, self._is_old, strict=True) if is_old])
        self._waiting.clear()
        self._is_old.clear()
        return reduced

    def _warn_of_noise(self, metrics: Sequence[Mapping[str, float]]) -> None:
        """Warn once if the policy differs by more than rounding from the old policy while both are the same.

        `metrics` are those of the micro-batches in which they are.
        """
        kl = mean_of_numbers([each["kl_to_old"] for each in metrics])
        if self._has_warned or not kl > ROUNDED_KL:  # true for NaN, too
            return
        self._has_warned, args = True, self._trainer.args
        cause = (
            "a layer that in training mode draws at random, or reads the whole batch as batch norm does, and that "
            "`disable_dropout` does not know"
            if args.disable_dropout
            else "that `disable_dropout` is False"
        )
        if args.process_index == 0:
            logger.warning(
                f"Two passes of the same policy differ: before any update on a rollout, the KL to the old policy is "
                f"{kl:.1g} nats per token, and rounding stays below {ROUNDED_KL:g}. The likely cause is {cause}. All "
                "ratios have this noise, which clips turns and, through `target_kl`, lowers the learning rate."
            )


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
    below = is_outside(ratio, low, math.inf).float()
    sums.add_mean("clip_fraction/negative_turn", below, present & (turn_advantages < 0))
    sums.add_mean("kl_to_old", kl_to_old(log_ratio, turns.loss_mask, "unbiased"), turns.counts > 0)
    sums.add_weights("effective_sample_size", batch.ratio, turns.loss_mask)
    sums.add_weights("effective_sample_size/token", log_ratio.exp(), turns.loss_mask)
    if batch.level == "sequence":
        of_units = importance_ratio(log_ratio, turns, "sequence", batch.turn_ratio)
        outside = masked_mean(is_outside(of_units, *batch.clip_range[:2]).float(), turns.loss_mask, dim=1)
        sums.add_mean("clip_fraction/sequence", outside, turns.counts > 0)
    return sums


@torch.no_grad()
def add_clip_ratios(sums: MetricSums, batch: MicroBatch, stopped: Tensor) -> None:
    """TRL's `clip_ratio/…`: the share of tokens whose gradient is stopped, (B, T) bool, on either side of 1.

    At the sequence level it is, as in TRL, the share of trajectories.
    """
    above = batch.ratio.detach() > 1
    low, high = (stopped & ~above).float(), (stopped & above).float()
    sums.add_mean("clip_ratio/low_mean", *of_units(low, batch))
    sums.add_mean("clip_ratio/high_mean", *of_units(high, batch))
    sums.add_mean("clip_ratio/region_mean", *of_units(low + high, batch))
    sums.add_min("clip_ratio/low_min", masked_mean(low, batch.loss_mask, dim=1), batch.turns.counts > 0)
    sums.add_max("clip_ratio/high_max", masked_mean(high, batch.loss_mask, dim=1), batch.turns.counts > 0)


def _amin(values: Tensor) -> Tensor:
    return values.min().float() if values.numel() else torch.tensor(float("inf"), device=values.device)
