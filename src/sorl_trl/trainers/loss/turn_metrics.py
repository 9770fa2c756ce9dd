"""What a turn-level loss logs about itself; docs/metrics.md explains every name."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from sorl_trl.ops import (
    TurnLayout,
    effective_sample_size,
    importance_ratio,
    is_outside,
    kl_to_old,
    masked_mean,
    range_of_turns,
    turn_layout,
    turn_reduce,
    weight_sums,
)
from sorl_trl.trainers.loss.micro_batch import ClipRange, ClipRanges


class MetricSums:
    """Means, extremes and weights of one micro-batch, to be reduced over all ranks."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[Tensor, Tensor]] = {}
        self._rank_means: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._minima: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}

    def add_mean(self, name: str, values: Tensor, keep: Tensor) -> None:
        """The mean of `values` where `keep`; both of one shape. Ranks with more of them count more."""
        keep = keep.bool()
        self._means[name] = (torch.where(keep, values, 0.0).sum().float(), keep.sum().float())

    def add_rank_mean(self, name: str, value: Tensor) -> None:
        """The mean over ranks of a scalar, those where it is NaN aside."""
        self._rank_means[name] = value.detach().float()

    def add_min(self, name: str, values: Tensor, keep: Tensor) -> None:
        """The least of `values` where `keep`."""
        self._minima[name] = _amin(torch.where(keep.bool(), values, float("inf")))

    def add_max(self, name: str, values: Tensor, keep: Tensor) -> None:
        """The largest of `values` where `keep`."""
        self._maxima[name] = -_amin(torch.where(keep.bool(), -values, float("inf")))

    def add_weights(self, name: str, weights: Tensor, keep: Tensor) -> None:
        """The effective sample size of `weights` where `keep`, over the micro-batches that are reduced together."""
        self._weights[name] = weight_sums(weights, keep).float()

    @property
    def names(self) -> list[str]:
        """Of its metrics, in the order in which `_reduced` has their values."""
        return [*self._means, *self._rank_means, *self._minima, *self._maxima, *self._weights]

    def row(self) -> Tensor:
        """(N,) all numbers that other ranks need of this one."""
        pairs = [number for pair in self._means.values() for number in pair]
        extremes = [-low for low in self._minima.values()] + list(self._maxima.values())
        weights = [number for three in self._weights.values() for number in three]
        return torch.stack([*pairs, *self._rank_means.values(), *extremes, *weights])

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """Every metric over all ranks; NaN, which TRL leaves out of its averages, where nothing was kept anywhere."""
        return reduce_all([self], accelerator)[0]

    def _reduced(self, rows: Tensor) -> Tensor:
        """(R, M, N) the rows of R ranks and M micro-batches to (M, len(names)) metrics."""
        extreme = len(self._minima) + len(self._maxima)
        sizes = [2 * len(self._means), len(self._rank_means), extreme, 3 * len(self._weights)]
        pairs, ranks, extremes, weights = torch.split(rows, sizes, dim=-1)
        sums = pairs.sum(0).view(pairs.shape[1], -1, 2)
        tops = extremes.amax(0)
        tops = torch.where(tops == -float("inf"), float("nan"), tops)
        lows, highs = -tops[:, : len(self._minima)], tops[:, len(self._minima) :]
        of_step = weights.sum(dim=(0, 1)).view(-1, 3)
        # Of all micro-batches together: said with the last, and NaN with those before it.
        effective = torch.full_like(weights[0, :, : len(of_step)], float("nan"))
        effective[-1] = effective_sample_size(of_step)
        # 0 / 0 is NaN
        return torch.cat([sums[..., 0] / sums[..., 1], ranks.nanmean(0), lows, highs, effective], dim=-1)


def reduce_all(sums: Sequence[MetricSums], accelerator: Accelerator) -> list[dict[str, float]]:
    """The metrics of each micro-batch over all ranks: one collective for all, and one wait for the device.

    The micro-batches must have the same metrics, and the ranks as many micro-batches.
    """
    rows = accelerator.gather(torch.stack([each.row() for each in sums]).unsqueeze(0))
    return [dict(zip(sums[0].names, values, strict=True)) for values in sums[0]._reduced(rows).tolist()]


def mean_of_numbers(values: Sequence[float]) -> float:
    """The mean of those that are no NaN; NaN if none is left."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan


def _amin(values: Tensor) -> Tensor:
    return values.min().float() if values.numel() else torch.tensor(float("inf"), device=values.device)


@torch.no_grad()
def turn_metrics(
    log_ratio: Tensor, turns: TurnLayout, advantages: Tensor, clip_ranges: ClipRanges, turn_ratio: str
) -> MetricSums:
    """The turn, ratio, clip and KL metrics of one micro-batch.

    Args:
        log_ratio: (B, T) token log-ratios.
        turns: the turns of the B trajectories.
        advantages: (B, T) or (B, 1), before any weighting.
        clip_ranges: of the ratios of tokens and turns.
        turn_ratio: "geometric" or "arithmetic", the ratio that the turn metrics describe.
    """
    of_token, (low, high, _) = clip_ranges.tokens, clip_ranges.turns
    low, high = range_of_turns(low, turns), range_of_turns(high, turns)
    present = turns.turn_mask
    token_ratio = log_ratio.float().exp()
    ratio = turn_reduce(importance_ratio(log_ratio, turns, "turn", turn_ratio), turns)
    turn_advantages = turn_reduce(advantages.expand_as(log_ratio), turns)
    outside_tokens = is_outside(token_ratio, of_token.low, of_token.high)

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
    sums.add_mean("kl_to_old", *kl_of_trajectories(log_ratio, turns))
    return sums


def kl_of_trajectories(log_ratio: Tensor, turns: TurnLayout) -> tuple[Tensor, Tensor]:
    """(B,) KL to the old policy of each trajectory, nats per token, and (B,) whether it has a token."""
    return kl_to_old(log_ratio, turns.loss_mask, "unbiased"), turns.counts > 0


@torch.no_grad()
def add_sequence_clips(sums: MetricSums, log_ratio: Tensor, turns: TurnLayout, clip_range: ClipRange) -> None:
    """The share of trajectories whose sequence ratio is outside the range.

    Args:
        sums: where it is added.
        log_ratio: (B, T) token log-ratios.
        turns: the turns of the B trajectories.
        clip_range: of sequence ratios.
    """
    outside = is_outside(importance_ratio(log_ratio, turns, "sequence"), clip_range.low, clip_range.high)
    sums.add_mean("clip_fraction/sequence", masked_mean(outside.float(), turns.loss_mask, dim=1), turns.counts > 0)


@torch.no_grad()
def add_scaled_range(sums: MetricSums, turns: TurnLayout, level: str, clip_ranges: ClipRanges) -> None:
    """How far a ratio may go, in the mean over sequences at their level and over turns at the others.

    Args:
        sums: where it is added.
        turns: the turns of the B trajectories.
        level: of the ratio that the surrogate clips.
        clip_ranges: scaled, so that those of turns and sequences are (B, T).
    """
    units, clip_range = turns, clip_ranges.turns
    if level == "sequence":  # each trajectory is one turn
        units, clip_range = turn_layout(torch.where(turns.loss_mask, 0, -1), 1), clip_ranges.units
    for name, side in (("clip_range/low", clip_range.low), ("clip_range/high", clip_range.high)):
        sums.add_mean(name, torch.as_tensor(range_of_turns(side, units)), units.turn_mask)


@torch.no_grad()
def add_clip_ratios(
    sums: MetricSums,
    ratio: Tensor,
    turns: TurnLayout,
    advantages: Tensor,
    clip_range: ClipRange,
    double_sided: bool = False,
) -> None:
    """TRL's `clip_ratio/…`: the share of tokens whose ratio is out of the range where clipping stops the gradient.

    Args:
        sums: where they are added.
        ratio: (B, T), of each token's unit.
        turns: the turns of the B trajectories.
        advantages: (B, T) or (B, 1).
        clip_range: of the ratio.
        double_sided: whether clipping stops the gradient on both sides, whatever the sign of the advantage.
    """
    ratio = ratio if clip_range.delta is None else ratio.clamp(max=clip_range.delta).to(ratio.dtype)  # as TRL
    pulls_down, pulls_up = (advantages != 0,) * 2 if double_sided else (advantages < 0, advantages > 0)
    low = (is_outside(ratio, clip_range.low, math.inf) & pulls_down).float()
    high = (is_outside(ratio, math.inf, clip_range.high) & pulls_up).float()
    kept = turns.loss_mask
    sums.add_mean("clip_ratio/low_mean", low, kept)
    sums.add_mean("clip_ratio/high_mean", high, kept)
    sums.add_mean("clip_ratio/region_mean", low + high, kept)
    sums.add_min("clip_ratio/low_min", masked_mean(low, kept, dim=1), turns.counts > 0)
    sums.add_max("clip_ratio/high_max", masked_mean(high, kept, dim=1), turns.counts > 0)
