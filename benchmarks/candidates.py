"""Ways to hold a policy near the old one that are not in the package: the benchmark tries them on equal terms.

`CandidateTrainer` is SO-GRPO with one of them switched on. It runs in one process only. What proves itself becomes an
option of the trainers; what does not stays here, with its row in the tables.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.ops import TurnLayout
from sorl_trl.trainers.checks.inert import updates_per_rollout
from sorl_trl.trainers.loss.kl_schedule import MIN_FACTOR, STEP, KLSchedule
from sorl_trl.trainers.loss.micro_batch import ClipRange, ClipRanges, MicroBatch, clip_ranges
from sorl_trl.trainers.loss.turn_metrics import kl_of_trajectories

COEF_RANGE = (0.03, 300.0)
"""Of a coefficient that follows the KL."""


@dataclass
class CandidateConfig(SOGRPOConfig):
    """`SOGRPOConfig` and the candidates, all off. KLs are `kl_to_old`, in nats per token, of one update."""

    coef_target: float = 0.0
    """λ follows the KL in place of the learning rate: times 1.5 above twice this, divided by 1.5 below half of it."""
    stop_above: float = 0.0
    """A rollout's updates are left out from the one on that finds more than this."""
    closes_below: float = 0.0
    """The penalty is weighed by max(0, 1 − this / KL): it closes as the KL falls to it."""
    rollout_kl: float = 0.0
    """The learning rate follows the mean KL of whole rollouts to this (`RolloutSchedule`); needs `target_kl=0`."""
    masks_units: bool = False
    """`double_sided_clip`, which it has become, under the name that its archived runs have."""
    shares_range: bool = False
    """The range of a unit's ratio is divided by the tokens of its trajectory: its turns share one range."""

    def __post_init__(self) -> None:
        self.double_sided_clip |= self.masks_units
        super().__post_init__()


class CandidateTrainer(SOGRPOTrainer):
    """`SOGRPOTrainer` with the candidate that its config names."""

    config_class = CandidateConfig
    args: CandidateConfig
    _is_stopped = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.rollout_kl:
            if self.args.target_kl:
                raise ValueError(f"`target_kl` is {self.args.target_kl}, but with `rollout_kl` only 0 is allowed.")
            updates = int(updates_per_rollout(self.args))
            schedule = RolloutSchedule(self.args.rollout_kl, updates, self.accelerator, self._record_lr_factor)
            self.add_callback(schedule)
            self._observers.append(schedule)

    def _clip_ranges(self, turns: TurnLayout) -> ClipRanges:
        if not self.args.shares_range:
            return super()._clip_ranges(turns)
        of_token = ClipRange(self.epsilon_low, self.epsilon_high, self.args.delta)
        return clip_ranges(of_token, turns, "sequence", "length")

    def _with_own_terms(self, loss: Tensor, batch: MicroBatch) -> Tensor:
        if not batch.is_training:
            return super()._with_own_terms(loss, batch)
        values, kept = kl_of_trajectories(batch.log_ratio.detach(), batch.turns)
        kl = float(values[kept].mean()) if bool(kept.any()) else 0.0
        if self._begins_rollout():
            self._is_stopped = False
        if self.args.stop_above:
            self._is_stopped |= kl > self.args.stop_above
        if self.args.coef_target and batch.age:
            self.args.ctn_coef = following(self.args.ctn_coef, kl, self.args.coef_target)
        if not self.args.closes_below:
            return super()._with_own_terms(loss, batch)
        before = self.args.ctn_coef
        self.args.ctn_coef = before * max(0.0, 1 - self.args.closes_below / max(kl, 1e-12))
        try:
            return super()._with_own_terms(loss, batch)
        finally:
            self.args.ctn_coef = before

    def _begins_rollout(self) -> bool:
        """Whether this is its first micro-batch; neither its age says so nor its birth, which stale rollouts share."""
        return self._step % (self.args.steps_per_generation * self.num_iterations) == 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._is_stopped:  # without gradients AdamW leaves weights and moments alone
            model.zero_grad(set_to_none=True)
        return loss


class RolloutSchedule(KLSchedule):
    """Sets the factor once per rollout, as if the KL grew with the square of the learning rate, and brakes between."""

    def __init__(self, target_kl: float, updates: int, *args: Any) -> None:
        super().__init__(target_kl, *args)
        self._updates = updates
        self._factors: list[float] = []
        self._moved: list[tuple[float, float]] = []
        self._age = 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        self._factors, self._moved, self._age = [], [], 0

    def observe(self, batch: MicroBatch) -> None:
        self._age = batch.age or 0
        super().observe(batch)

    def _next_factor(self, before: float, kl: float) -> float:
        factor = before
        if len(self._factors) % self._updates == 0 and self._moved:
            factor = planned_factor(self._moved, self.target_kl)
            factor = min(factor, 1.5 * statistics.fmean(self._factors[-self._updates :]), 1.0)
            self._moved = []
        if kl > 4 * self.target_kl:
            factor = min(factor, before / STEP)
        if self._age and self._factors and kl > 0:
            self._moved.append((statistics.fmean(self._factors[-self._age :]), kl))
        self._factors.append(max(factor, MIN_FACTOR))
        return self._factors[-1]


def planned_factor(moved: Sequence[tuple[float, float]], target: float) -> float:
    """Of the factors with which updates were reached and the KLs that they found: what would have found `target`."""
    return math.sqrt(target * sum(factor**2 for factor, _ in moved) / sum(kl for _, kl in moved))


def following(coef: float, kl: float, target: float) -> float:
    """λ after an update that found `kl`, by the rule of the learning rate (`kl_controlled_factor`) turned round."""
    if kl > 2 * target:
        return min(coef * STEP, COEF_RANGE[1])
    return max(coef / STEP, COEF_RANGE[0]) if 0 < kl < target / 2 else coef
