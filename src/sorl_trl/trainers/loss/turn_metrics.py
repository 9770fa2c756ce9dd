"""What a turn-level loss logs about itself; docs/metrics.md explains every name."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor

from sorl_trl.ops import importance_ratio, kl_to_old, turn_mask, turn_reduce


class MetricSums:
    """Means and extremes over all ranks, reduced in a single collective."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[Tensor, Tensor]] = {}
        self._maxima: dict[str, Tensor] = {}
        self._minima: dict[str, Tensor] = {}

    def add_mean(self, name: str, values: Tensor, keep: Tensor) -> None:
        """The mean of `values` where `keep`; both of one shape."""
        keep = keep.bool()
        self._means[name] = (torch.where(keep, values, 0.0).sum().float(), keep.sum().float())

    def add_extremes(self, name: str, values: Tensor, keep: Tensor) -> None:
        """`<name>_min` and `<name>_max` of `values` where `keep`."""
        keep = keep.bool()
        self._minima[f"{name}_min"] = _amin(torch.where(keep, values, float("inf")))
        self._maxima[f"{name}_max"] = -_amin(torch.where(keep, -values, float("inf")))

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """Every metric over all ranks; NaN, which TRL leaves out of its averages, where nothing was kept anywhere."""
        pairs = [t for pair in self._means.values() for t in pair]
        extremes = [-t for t in self._minima.values()] + list(self._maxima.values())
        gathered = accelerator.gather(torch.stack(pairs + extremes).unsqueeze(0))
        sums = gathered[:, : len(pairs)].sum(0).view(-1, 2)
        means = sums[:, 0] / sums[:, 1]  # 0 / 0 is NaN: nothing to average
        tops = gathered[:, len(pairs) :].max(0).values
        tops = torch.where(tops == -float("inf"), float("nan"), tops)
        lows, highs = -tops[: len(self._minima)], tops[len(self._minima) :]
        return {
            **dict(zip(self._means, means.tolist(), strict=True)),
            **dict(zip(self._minima, lows.tolist(), strict=True)),
            **dict(zip(self._maxima, highs.tolist(), strict=True)),
        }


def _amin(values: Tensor) -> Tensor:
    return values.min().float() if values.numel() else torch.tensor(float("inf"), device=values.device)


@torch.no_grad()
def turn_metrics(
    log_ratio: Tensor, turn_ids: Tensor, advantages: Tensor, clip_range: tuple[float, float], turn_ratio: str
) -> MetricSums:
    """The turn, ratio, clip and KL metrics of one micro-batch.

    Args:
        log_ratio: (B, T) token log-ratios.
        turn_ids: (B, T) int64.
        advantages: (B, T) or (B, 1), before any weighting.
        clip_range: (1 - epsilon_low, 1 + epsilon_high).
        turn_ratio: "geometric" or "arithmetic", the ratio that the turn metrics describe.
    """
    low, high = clip_range
    loss_mask = turn_ids >= 0
    present = turn_mask(turn_ids).bool()
    token_ratio = log_ratio.float().exp()
    ratio = turn_reduce(importance_ratio(log_ratio, turn_ids, "turn", turn_ratio), turn_ids)
    turn_advantages = turn_reduce(advantages.expand_as(log_ratio), turn_ids)
    outside = ((ratio < low) | (ratio > high)).float()
    every = present.new_ones(present.shape[0])

    sums = MetricSums()
    sums.add_mean("turns/per_trajectory", present.float().sum(-1), every)
    sums.add_mean("turns/length", turn_reduce(torch.ones_like(token_ratio), turn_ids, "sum"), present)
    sums.add_mean("turns/ratio_mean", ratio, present)
    sums.add_extremes("turns/ratio", ratio, present)
    sums.add_mean("clip_fraction/token", ((token_ratio < low) | (token_ratio > high)).float(), loss_mask)
    sums.add_mean("clip_fraction/turn", outside, present)
    sums.add_mean("clip_fraction/negative_turn", (ratio < low).float(), present & (turn_advantages < 0))
    sums.add_mean("kl_to_old", kl_to_old(log_ratio, loss_mask, "unbiased"), loss_mask.any(-1))
    return sums
