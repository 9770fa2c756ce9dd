"""Candidates for a trust region that holds at any turn length, and the settings in which they are told apart.

Three parts are combined: the clip range of a turn, a stop of a rollout's updates once the KL to the old policy passes
a bound, and how the learning rate follows that KL. What wins moves into the package; what loses leaves with its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.equal_plan import ARMS, NOISE_REGIMES
from benchmarks.equal_plan import EVERY_METHOD as EARLIER_METHODS
from benchmarks.equal_plan import EVERY_REGIME as EARLIER_REGIMES
from benchmarks.stability_plan import ALL_REGIMES, METHODS, NO_PIECES, Regime
from benchmarks.worlds.working import HOPS, WorkingWorld
from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.methods import SO_GRPO, Method, MicroBatch, Objective, PPOMin
from sorl_trl.ops import clipped_surrogate, is_clipped, kl_controlled_factor, kl_to_old, turn_broadcast
from sorl_trl.trainers.optimizer_step import KLControl

_STEP = 1.5
"""By how much one change divides or multiplies the learning rate."""


@dataclass
class TrustConfig(SOGRPOConfig):
    """Options of the candidates. Bounds and `target_kl` are in nats per `kl_unit`; 0 switches a bound off."""

    kl_unit: str = field(default="token", metadata={"help": "'token', 'root', 'turn' or 'trajectory'"})
    stop_kl: float = field(default=0.0, metadata={"help": "the KL beyond which a rollout's updates stop"})
    kl_over: str = field(default="update", metadata={"help": "what stop and controller read: an 'update' or a 'pass'"})
    control_by: str = field(default="update", metadata={"help": "the rate changes after an 'update' or a 'rollout'"})
    first_factor: float = field(default=1.0, metadata={"help": "the share of the rate with which a run begins"})
    skip_empty: bool = field(default=False, metadata={"help": "whether an update without a gradient makes no step"})


def unit_kl(batch: MicroBatch, unit: str) -> Tensor:
    """(B,) the KL to the old policy of each trajectory, in nats per token, per turn or in all.

    "root" is the geometric mean of the KL per token and the KL per turn.
    """
    tokens = batch.loss_mask.sum(1)
    per_token = kl_to_old(batch.log_ratio.detach(), batch.loss_mask, "unbiased")
    length = tokens / batch.turns.counts.clamp(min=1)
    return per_token * {"token": 1.0, "root": length.sqrt(), "turn": length, "trajectory": tokens}[unit]


@dataclass(frozen=True)
class BoundedMin(PPOMin):
    """PPO's surrogate without the trajectories whose KL has passed a bound, in nats per `unit`."""

    bound: float = 0.01
    unit: str = "token"

    def __call__(self, batch: MicroBatch) -> Objective:
        value, stopped = super().__call__(batch)
        beyond = (unit_kl(batch, self.unit) > self.bound).unsqueeze(1)
        return Objective(torch.where(beyond, value.detach(), value), stopped | beyond)


@dataclass(frozen=True)
class CappedMin(PPOMin):
    """PPO's surrogate with the range ε · min(1, `tokens` / n) for a turn of n tokens."""

    epsilon: float = 0.1
    tokens: float = 4.0

    def __call__(self, batch: MicroBatch) -> Objective:
        lengths = turn_broadcast(batch.turns.lengths, batch.turns).clamp(min=1)
        epsilon = self.epsilon * (self.tokens / lengths).clamp(max=1)
        ratio = batch.ratio
        value = clipped_surrogate(ratio, batch.advantages, epsilon, epsilon)
        return Objective(value, is_clipped(ratio.detach(), batch.advantages, epsilon, epsilon))


@dataclass(frozen=True)
class SpreadMin(PPOMin):
    """PPO's surrogate with a range of z standard deviations of a turn's mean log-ratio at the target KL.

    With k nats per token, ℓ has a variance of about 2k, and its mean over n tokens a standard deviation of √(2k/n).
    The target KL is κ/√n per token, so the range is z √(2κ) n^(−3/4).
    """

    z: float = 1.5
    target: float = 0.01

    def __call__(self, batch: MicroBatch) -> Objective:
        lengths = turn_broadcast(batch.turns.lengths, batch.turns).clamp(min=1)
        epsilon = self.z * (2 * self.target) ** 0.5 * lengths.double() ** -0.75
        ratio = batch.ratio
        value = clipped_surrogate(ratio, batch.advantages, epsilon, epsilon)
        return Objective(value, is_clipped(ratio.detach(), batch.advantages, epsilon, epsilon))


class TrustRegion(KLControl):
    """Follows the KL of a rollout's updates, stops them beyond a bound, and sets the learning rate."""

    def __init__(self, args: TrustConfig, window: int, record: Callable[[float], object]) -> None:
        super().__init__(args.target_kl, record)
        self._args, self._window = args, window
        self._kls: list[float] = []
        self.has_stopped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._set(self._args.first_factor)

    def begin_rollout(self) -> None:
        """Change the rate by the peak of the rollout before."""
        if self._args.control_by == "rollout" and self.target_kl and self._kls:
            peak = max(self._measure(end) for end in range(1, len(self._kls) + 1))
            before = self._factor
            if self.has_stopped or peak > 2 * self.target_kl:
                self._set(max(before / _STEP, 0.01))
            elif peak < self.target_kl:
                self._set(min(before * _STEP, 1.0))
        self._kls, self.has_stopped = [], False

    def observe(self, batch: MicroBatch, kl: float) -> None:
        if not batch.is_training:
            return
        if batch.has_moved:
            self._kls.append(float(unit_kl(batch, self._args.kl_unit).mean()))
            measured = self._measure(len(self._kls))
            if self._args.control_by == "update" and self.target_kl:
                self._set(kl_controlled_factor(self._factor, measured, self.target_kl))
            self.has_stopped = 0 < self._args.stop_kl < measured
        if self.target_kl:
            self._record(self._factor)

    def _measure(self, end: int) -> float:
        """The KL after `end` updates of the rollout: that of the last one, or the mean over the last pass."""
        window = self._window if self._args.kl_over == "pass" else 1
        kls = self._kls[max(0, end - window) : end]
        return math.fsum(kls) / len(kls)

    @property
    def _factor(self) -> float:
        return float(getattr(self._scheduler, "policy_lr_factor", 1.0))

    def _set(self, factor: float) -> None:
        if factor != self._factor:
            self._scale(self._factor, factor)


class TrustTrainer(SOGRPOTrainer):
    """SO-GRPO with a candidate's trust region. One micro-batch per update, and one process."""

    args: TrustConfig
    config_class = TrustConfig

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.remove_callback(self._kl_control)
        window, record = int(self.args.steps_per_generation or 1), self._kl_control._record
        self._kl_control = self._region = TrustRegion(self.args, window, record)
        self.add_callback(self._region)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        is_first = self._step % self.args.cycle_steps == 0
        if is_first:
            self._region.begin_rollout()
        stopped = self._metrics["train"]["updates_stopped"]
        if self._region.has_stopped:
            self._step += 1
            stopped.append(1.0)
            return torch.zeros((), device=self.accelerator.device)
        loss = super().training_step(model, inputs, num_items_in_batch)
        is_skipped = self._region.has_stopped or (self.args.skip_empty and self._is_empty())
        if is_skipped:  # a step without gradients moves nothing, not even by momentum
            self.optimizer.zero_grad(set_to_none=True)
        stopped.append(float(is_skipped))
        return loss

    def _is_empty(self) -> bool:
        return not any(bool(p.grad.any()) for p in self.model.parameters() if p.grad is not None)


# -------------------------------------------------------------------------------------------------------------------
# Candidates
# -------------------------------------------------------------------------------------------------------------------


def _candidate(title: str, method: Method = SO_GRPO, **settings: Any) -> Any:
    return replace(METHODS["so_grpo"], title=title, trainer="trust", settings=settings, method=method)


def _per_token(c: float) -> dict[str, Any]:
    """A turn's range is c over its tokens."""
    return {"epsilon": c, "epsilon_high": c, "clip_range_scaling": "length"}


def _per_root(z: float) -> dict[str, Any]:
    """A turn's range is z · 0.1 over the root of its tokens."""
    return {"epsilon": 0.1 * z, "epsilon_high": 0.1 * z, "clip_range_scaling": "sqrt_length"}


_STOP = {"stop_kl": 0.01, "control_by": "rollout"}
_PASS = {"kl_over": "pass"}
_CAPPED = replace(SO_GRPO, surrogate=CappedMin())
_OF_ROOT = {"kl_unit": "root", "target_kl": 0.01}
_OF_TURN = {"kl_unit": "turn", "target_kl": 0.02}
CANDIDATES = {
    "today": _candidate("today's default"),
    "at2po": _candidate("range 3e-3, 4e-3 (AT²PO)", epsilon=3e-3, epsilon_high=4e-3),
    "c.4": _candidate(".4/n", **_per_token(0.4)),
    "c.2": _candidate(".2/n", **_per_token(0.2)),
    "c.1": _candidate(".1/n", **_per_token(0.1)),
    "z1": _candidate("z = 1", **_per_root(1.0)),
    "turn-kl": _candidate("KL per turn, target .02", **_OF_TURN),
    "c.4-turn-kl": _candidate(".4/n, KL per turn, target .02", **_per_token(0.4), **_OF_TURN),
    "c.4-stop": _candidate(".4/n, stop at .01, rate per rollout", **_per_token(0.4), **_STOP),
    "c.4-stop-pass": _candidate(
        ".4/n, stop at .01 over a pass, rate per rollout", **_per_token(0.4), **_STOP, **_PASS
    ),
    "turn-kl-stop": _candidate(
        "KL per turn, target .02, stop at .04 over a pass, rate per rollout",
        **_OF_TURN | _PASS | {"stop_kl": 0.04, "control_by": "rollout"},
    ),
    "c.4-turn-kl-stop": _candidate(
        ".4/n, KL per turn, target .02, stop at .04 over a pass, rate per rollout",
        **_per_token(0.4) | _OF_TURN | _PASS | {"stop_kl": 0.04, "control_by": "rollout"},
    ),
    "slow": _candidate(".4/n, KL per turn, target .02, from .1", **_per_token(0.4), **_OF_TURN, first_factor=0.1),
    "slow.05": _candidate(
        ".4/n, KL per turn, target .05, from .1", **_per_token(0.4), kl_unit="turn", target_kl=0.05, first_factor=0.1
    ),
    "slow.01": _candidate(
        ".4/n, KL per turn, target .01, from .1", **_per_token(0.4), kl_unit="turn", target_kl=0.01, first_factor=0.1
    ),
    "slow-c.2": _candidate(".2/n, KL per turn, target .02, from .1", **_per_token(0.2), **_OF_TURN, first_factor=0.1),
    "slow-wide": _candidate("range .1, KL per turn, target .02, from .1", **_OF_TURN, first_factor=0.1),
    "slow-pass": _candidate(
        ".4/n, KL per turn over a pass, target .02, from .1", **_per_token(0.4), **_OF_TURN, **_PASS, first_factor=0.1
    ),
    "slow-token": _candidate(".4/n, KL per token, target .005, from .1", **_per_token(0.4), first_factor=0.1),
    "slow.1": _candidate(
        ".4/n, KL per turn, target .1, from .1", **_per_token(0.4), kl_unit="turn", target_kl=0.1, first_factor=0.1
    ),
    "wide.05": _candidate(
        "range .1, KL per turn, target .05, from .1", kl_unit="turn", target_kl=0.05, first_factor=0.1
    ),
    "wide.1": _candidate("range .1, KL per turn, target .1, from .1", kl_unit="turn", target_kl=0.1, first_factor=0.1),
    "fast.05": _candidate(".4/n, KL per turn, target .05, from 1", **_per_token(0.4), kl_unit="turn", target_kl=0.05),
    "slower.05": _candidate(
        ".4/n, KL per turn, target .05, from .02", **_per_token(0.4), kl_unit="turn", target_kl=0.05, first_factor=0.02
    ),
    "whole.2": _candidate(
        ".4/n, KL per trajectory, target .2, from .1",
        **_per_token(0.4) | {"kl_unit": "trajectory", "target_kl": 0.2, "first_factor": 0.1},
    ),
    **{
        f"root{target:g}": _candidate(
            f".4/n, KL per root of the turn's tokens, target {target:g}, from .1",
            **_per_token(0.4) | {"kl_unit": "root", "target_kl": target, "first_factor": 0.1},
        )
        for target in (0.005, 0.01, 0.02)
    },
    "root0.01-fast": _candidate(
        ".4/n, KL per root of the turn's tokens, target 0.01, from 1",
        **_per_token(0.4) | {"kl_unit": "root", "target_kl": 0.01},
    ),
    "root0.01-c.2": _candidate(
        ".2/n, KL per root of the turn's tokens, target 0.01, from .1",
        **_per_token(0.2) | {"kl_unit": "root", "target_kl": 0.01, "first_factor": 0.1},
    ),
    "cap": _candidate("min(.1, .4/n), KL per root, target 0.01, from .1", _CAPPED, **_OF_ROOT, first_factor=0.1),
    "cap-fast": _candidate("min(.1, .4/n), KL per root, target 0.01, from 1", _CAPPED, **_OF_ROOT),
    "cap-turn": _candidate("min(.1, .4/n), KL per turn, target .02, from .1", _CAPPED, **_OF_TURN, first_factor=0.1),
    "cap-token": _candidate("min(.1, .4/n), KL per token, target .005, from 1", _CAPPED),
    "cap8": _candidate(
        "min(.1, .8/n), KL per root, target 0.01, from .1",
        replace(SO_GRPO, surrogate=CappedMin(tokens=8.0)),
        **_OF_ROOT,
        first_factor=0.1,
    ),
    **{
        f"spread{z}{name}": _candidate(
            f"{z} standard deviations, KL per root, target {target:g}, from {first:g}",
            replace(SO_GRPO, surrogate=SpreadMin(z, target)),
            **{"kl_unit": "root", "target_kl": target, "first_factor": first},
        )
        for z in (1, 2, 3)
        for name, target, first in (
            ("", 0.01, 0.1),
            ("-fast", 0.01, 1.0),
            ("-k15", 0.015, 0.1),
            ("-k15-fast", 0.015, 1.0),
        )
    },
    "spread2-mid": _candidate(
        "2 standard deviations, KL per root, target 0.01, from 0.3",
        replace(SO_GRPO, surrogate=SpreadMin(2, 0.01)),
        **_OF_ROOT,
        first_factor=0.3,
    ),
    **{
        f"spread{z}{name}": _candidate(
            f"{z} standard deviations, KL per root, target 0.01, from {first:g}",
            replace(SO_GRPO, surrogate=SpreadMin(z, 0.01)),
            **_OF_ROOT,
            first_factor=first,
        )
        for z in (0.25, 0.5)
        for name, first in (("", 0.1), ("-fast", 1.0))
    },
    **{
        f"wide{name}": _candidate(f"range .1, KL per root, target 0.01, from {first:g}", **_OF_ROOT, first_factor=first)
        for name, first in (("", 0.1), ("-mid", 0.3), ("-fast", 1.0))
    },
    "c.2-empty": _candidate(
        ".2/n, no penalty, empty updates make no step", NO_PIECES, **_per_token(0.2), skip_empty=True
    ),
    "c.2-mask": _candidate(
        ".2/n, without trajectories beyond .01, empty updates make no step",
        Method(surrogate=BoundedMin(0.01)),
        **_per_token(0.2),
        skip_empty=True,
    ),
}
BASELINES = ("sequence", "plain", "gspo_plain", "grpo_target")
"""Arms of `equal_plan.py`."""
VERY_LONG = "turns-of-200-in-3-hops"
LONG = {
    "turns-of-40-in-3-hops": ALL_REGIMES["turns-of-40-in-3-hops"],
    "turns-of-80-in-3-hops": ALL_REGIMES["turns-of-80-in-3-hops"],
    VERY_LONG: replace(
        ALL_REGIMES["turns-of-80-in-3-hops"],
        title=f"Turns of 200 tokens, {HOPS} hops",
        world=WorkingWorld(200),
        methods=(),
    ),
}
HEADLINE = ("reuse", "long", "hot", "stale", "hunt-reuse")
COLUMNS: dict[str, Regime] = {name: ALL_REGIMES[name] for name in HEADLINE} | LONG | NOISE_REGIMES
EVERY_REGIME = EARLIER_REGIMES | LONG
EVERY_METHOD = EARLIER_METHODS | CANDIDATES
assert not CANDIDATES.keys() & EARLIER_METHODS.keys() and {*BASELINES} <= ARMS.keys()
CHOOSING_SEEDS = (101, 105, 102, 106, 103, 107, 104, 108)
"""In long turns, 101 to 104 start from one policy and 105 to 108 from another."""
