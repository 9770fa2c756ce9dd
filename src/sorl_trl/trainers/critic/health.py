"""Whether the critic predicts the returns: metrics, and a warning when it does not. docs/metrics.md has the names."""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from sorl_trl.checks import POSITIVE_COUNT, check_number
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


class CriticWatch:
    """Notices a critic that predicts the returns no better than a constant would.

    Args:
        warmup_steps: optimizer steps whose observations do not count, `critic_warmup_steps`.
        window: observations that are averaged, one per rollout. 10 is ours: the explained variance of one batch is
            noisy.

    Raises:
        ValueError: `window` is less than 1.
    """

    def __init__(self, warmup_steps: int, window: int = 10) -> None:
        check_number("window", window, POSITIVE_COUNT)
        self._warmup_steps = warmup_steps
        self._window = window
        self._recent: deque[float] = deque(maxlen=window)
        self._has_warned = False

    def observe(self, explained_variance: float, step: int) -> str | None:
        """A warning, once the mean over the window is 0 or less; the next one after it was positive in between.

        Args:
            explained_variance: of one rollout; NaN is skipped.
            step: optimizer steps taken before it.
        """
        if step < self._warmup_steps or math.isnan(explained_variance):
            return None
        self._recent.append(explained_variance)
        if len(self._recent) < self._window:
            return None
        mean = sum(self._recent) / self._window
        is_new = mean <= 0 and not self._has_warned
        self._has_warned = mean <= 0
        return self._warning(mean) if is_new else None

    def _warning(self, mean: float) -> str:
        return (
            f"The critic's explained variance is {mean:.3g} on average over the last {self._window} rollouts that "
            "define one. At 0 or less it predicts the returns no better than a constant, and adds noise to the "
            "advantages. What can help: more `critic_warmup_steps`; another `critic_learning_rate` (higher if "
            "`critic/value_loss` hardly falls, lower if it grows); `gae_lambda` closer to 1, which trusts the critic "
            "less; more trajectories per batch (`generation_batch_size`); a `critic` with more capacity ('adapter' "
            "or 'model' rather than 'head')."
        )
