"""Logs what a turn-level loss says about itself, once per optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from sorl_trl.ops import importance_ratio
from sorl_trl.trainers.base_config import MINIRL_LOSS_TYPE, TurnLevelConfig
from sorl_trl.trainers.loss.micro_batch import MicroBatch
from sorl_trl.trainers.loss.mismatch import minirl_weights
from sorl_trl.trainers.loss.turn_metrics import (
    MetricSums,
    add_clip_ratios,
    add_scaled_range,
    add_sequence_clips,
    reduce_all,
    turn_metrics,
)

CLIP_RATIOS = tuple(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"))
"""What TRL logs of its surrogate: nothing, where ours takes its place."""


class MetricLog:
    """An observer that adds a value per metric and micro-batch to TRL's lists, as TRL does.

    On the device they are kept until the optimizer steps: then all ranks exchange them, and each waits for its device
    once, however many micro-batches there were.

    Args:
        args: of the trainer.
        accelerator: of the trainer.
        metrics: "train" and "eval" -> metric -> the values that were logged, where TRL keeps them.
    """

    def __init__(self, args: TurnLevelConfig, accelerator: Accelerator, metrics: Mapping[str, Any]) -> None:
        self.args = args
        self._accelerator = accelerator
        self._metrics = metrics
        self._terms: list[Callable[[MetricSums], None]] = []
        self._waiting: list[tuple[int | None, MetricSums]] = []
        self.of_last_step: list[tuple[int | None, dict[str, float]]] = []
        """What was logged last: of each micro-batch its `off_policy_age`, None where it has none, and its metrics."""

    def add_rank_mean(self, name: str, value: Tensor) -> None:
        """Log the mean over ranks of a scalar of the micro-batch whose loss is being formed."""
        self._terms.append(partial(MetricSums.add_rank_mean, name=name, value=value.detach()))

    def add_mean(self, name: str, values: Tensor, keep: Tensor) -> None:
        """Log the mean over all ranks' `values` where `keep`: ranks with more of them count more."""
        self._terms.append(partial(MetricSums.add_mean, name=name, values=values.detach(), keep=keep))

    def add_extremes(self, name: str, values: Tensor, keep: Tensor) -> None:
        """Log the least and the largest of all ranks' `values` where `keep`, as `name`_min and `name`_max."""
        for suffix, add in (("min", MetricSums.add_min), ("max", MetricSums.add_max)):
            self._terms.append(partial(add, name=f"{name}_{suffix}", values=values.detach(), keep=keep))

    def observe(self, batch: MicroBatch) -> None:
        """Take note of a micro-batch; log it and those before it if the optimizer steps after it."""
        mode = "train" if batch.is_training else "eval"
        log_ratio = batch.log_ratio.detach()
        sums = turn_metrics(log_ratio, batch.turns, batch.advantages, batch.clip_ranges, self.args.turn_ratio)
        self._add_ratios(sums, log_ratio, batch)
        if batch.has_own_surrogate:  # TRL's `clip_ratio/…` are ours to log
            for name in CLIP_RATIOS:
                self._metrics[mode][name].pop()
        for add in self._terms:
            add(sums)
        self._terms.clear()
        self._waiting.append((batch.age, sums))
        if batch.age is not None:
            self._metrics[mode]["off_policy_age"].append(batch.age)
        if batch.ends_step:
            self._write(mode)

    def _add_ratios(self, sums: MetricSums, log_ratio: Tensor, batch: MicroBatch) -> None:
        """What the level's ratio weighs and clips, and how wide its range is where it depends on the length."""
        level, turns, clip_range = self.args.ratio_level, batch.turns, batch.clip_ranges.units
        if level == "sequence":
            add_sequence_clips(sums, log_ratio, turns, clip_range)
        if self.args.clip_range_scaling_in_use != "none":
            add_scaled_range(sums, turns, level, batch.clip_ranges)
        ratio = importance_ratio(log_ratio, turns, level, self.args.turn_ratio)
        sums.add_weights("effective_sample_size", ratio, turns.loss_mask)
        if self.args.loss_type == MINIRL_LOSS_TYPE:
            is_capped = minirl_weights(ratio, batch.inputs) > self.args.minirl_cap
            sums.add_mean("minirl/capped_weights", is_capped.float(), turns.loss_mask)
        if batch.has_own_surrogate:
            add_clip_ratios(sums, ratio, turns, batch.advantages, clip_range, self.args.double_sided_clip)

    def _write(self, mode: str) -> None:
        ages, sums = zip(*self._waiting, strict=True)
        self.of_last_step = list(zip(ages, reduce_all(sums, self._accelerator), strict=True))
        for _, metrics in self.of_last_step:
            for name, value in metrics.items():
                self._metrics[mode][name].append(value)
        self._waiting.clear()
