"""Whether the critic predicts the returns: metrics, whose names docs/metrics.md explains."""

from __future__ import annotations

import torch
from torch import Tensor

from sorl_trl.ops import explained_variance

_OVERALL_NAMES = {
    "explained_variance": "critic/explained_variance",
    "value_mean": "critic/value_mean",
    "return_mean": "critic/return_mean",
    "advantage_mean": "advantages/mean",
    "advantage_std": "advantages/std",
}


def critic_metrics(values: Tensor, returns: Tensor, advantages: Tensor, unit_turns: Tensor) -> dict[str, float]:
    """What the critic and the advantages are like, overall and by turn index.

    NaN, which TRL leaves out of its averages, stands for what is undefined: an explained variance of equal returns, a
    standard deviation of fewer than two advantages, a mean of none. What is off the units never enters.

    Args:
        values: (N, U), the critic's V of all ranks' N trajectories, each of at most U units (turns or tokens).
        returns: (N, U), discounted rewards-to-go: what V predicts, without the critic's own part in its targets.
        advantages: (N, U), before whitening.
        unit_turns: (N, U) int64, the index of the turn that a unit is or belongs to, -1 where there is no unit.

    Returns:
        `critic/explained_variance`, `critic/value_mean`, `critic/return_mean`, `advantages/mean`, `advantages/std`,
        and for each turn index k that occurs `critic/turn_{k}/…` of the same five. The standard deviations are the
        unbiased ones, by which `whiten` divides.
    """
    kept = unit_turns >= 0
    overall = _statistics(values, returns, advantages, kept)
    metrics = {_OVERALL_NAMES[name]: statistic for name, statistic in overall.items()}
    for turn in torch.unique(unit_turns[kept]).tolist():
        of_turn = _statistics(values, returns, advantages, unit_turns == turn)
        metrics |= {f"critic/turn_{turn}/{name}": statistic for name, statistic in of_turn.items()}
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


def _statistics(values: Tensor, returns: Tensor, advantages: Tensor, kept: Tensor) -> dict[str, Tensor]:
    values, returns, advantages = (x[kept].float() for x in (values, returns, advantages))
    has_spread = advantages.numel() > 1
    return {
        "explained_variance": explained_variance(values, returns, torch.ones_like(values)),
        "value_mean": values.mean(),
        "return_mean": returns.mean(),
        "advantage_mean": advantages.mean(),
        "advantage_std": advantages.std() if has_spread else advantages.new_tensor(torch.nan),
    }
