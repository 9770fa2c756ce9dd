"""Notices a clip range that the ratios of turns or sequences never leave, or leave at once."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback

from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.config_rules import LOSSES_WITHOUT_MIN, scaling_refusal
from sorl_trl.trainers.loss.metric_log import MetricLog
from sorl_trl.trainers.loss.micro_batch import MicroBatch
from sorl_trl.trainers.loss.turn_metrics import mean_of_numbers

logger = get_logger(__name__)

UPDATES = 50
"""In which ratios differ from 1, before something is said. Ours, measured nowhere, as is the next."""
TOKENS_OUTSIDE = 0.01
"""Mean share of tokens outside the range, above which some unit would be expected to be outside now and then."""
MOST_OUTSIDE = 0.5
"""Mean share of units outside the range, above which clipping decides what is learnt."""
STILL = 5e-4
"""KL to the old policy, nats per token, below which a policy has hardly moved. Of 1,200 rollouts that the benchmarks
trained on with the defaults, in float32, none had both."""


class RangeWatch(TrainerCallback):
    """Warns once of a clip range that does nothing, and once of one that a policy leaves without moving.

    The first: token ratios leave the range and those of the level never do, so that nothing is clipped. One unit
    outside, once, however short, silences it for the rest of the run: it finds ranges that nothing leaves, not those
    that only the long units never leave.

    The second: most units are outside, while the KL to the old policy says that it has hardly moved. Then rounding
    decides what is clipped, or a range that is too narrow for the length of the units.

    It reads what `MetricLog` has reduced over all ranks, so that all see the same. A resumed run counts its updates
    anew, and does not say the first if the log of the run before has a unit outside the range.

    Args:
        args: of the trainer.
        metric_log: of the trainer, which observes each micro-batch before this does.
    """

    def __init__(self, args: TurnLevelConfig, metric_log: MetricLog) -> None:
        self.args = args
        self._metric_log = metric_log
        self._metric = clips_of(args)
        self._names = ("clip_fraction/token", self._metric, "kl_to_old")
        self._last: deque[list[float]] = deque(maxlen=UPDATES)
        """What updates had of these metrics."""
        has_no_units = args.ratio_level == "token" or args.loss_type in LOSSES_WITHOUT_MIN
        self._has_clipped = self._has_said_narrow = has_no_units

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What an earlier part of the run has logged counts."""
        self._has_clipped |= any((entry.get(self._metric) or 0.0) > 0 for entry in state.log_history)

    def observe(self, batch: MicroBatch) -> None:
        """Look at an update when it ends, and warn after `UPDATES` of them."""
        if (self._has_clipped and self._has_said_narrow) or batch.age is None or not batch.ends_step:
            return
        # In the first update of a rollout every ratio is 1.
        moved = [metrics for age, metrics in self._metric_log.of_last_step if age]
        self._has_clipped |= any(metrics[self._metric] > 0 for metrics in moved)
        means = [mean_of_numbers([metrics[name] for metrics in moved]) for name in self._names]
        if not any(map(math.isnan, means)):
            self._last.append(means)
        if len(self._last) == UPDATES:
            self._judge(*map(mean_of_numbers, zip(*self._last, strict=True)))

    def _judge(self, tokens_outside: float, units_outside: float, kl: float) -> None:
        """Say what the means over the last updates ask for."""
        if not self._has_clipped and tokens_outside > TOKENS_OUTSIDE:
            self._has_clipped = True
            logger.warning(range_warning(self.args, tokens_outside))
        if not self._has_said_narrow and units_outside > MOST_OUTSIDE and kl < STILL:
            self._has_said_narrow = True
            logger.warning(narrow_warning(self.args, units_outside, kl))


def range_warning(args: TurnLevelConfig, tokens_outside: float) -> str:
    """What to tell a user whose range clips nothing, and what to set.

    Args:
        args: of the trainer.
        tokens_outside: mean share of tokens whose ratio is outside the range.
    """
    level, scaling = args.ratio_level, args.clip_range_scaling_in_use
    narrower = {"none": "sqrt_length", "sqrt_length": "length"}.get(scaling)
    if narrower is None or scaling_refusal(args, narrower):
        advice = "Lower `epsilon` and `epsilon_high`"
    else:
        advice = f"Set `clip_range_scaling={narrower!r}`, which narrows the range as a {level} grows longer, or lower "
        advice += "`epsilon` and `epsilon_high`"
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    return (
        f"In the last {UPDATES} updates of rollouts that had been trained on before, {tokens_outside:.1%} of the "
        f"token ratios were outside the clip range, and no {level} ratio ever was: nothing is clipped. A {level} "
        f"ratio averages over the tokens of the {level}, so that it stays near 1, where `epsilon={args.epsilon:g}`, "
        f"`epsilon_high={high:g}` and `clip_range_scaling={scaling!r}` let it be. {advice} until "
        f"`{clips_of(args)}` in the log is above 0 in late updates."
    )


def narrow_warning(args: TurnLevelConfig, units_outside: float, kl: float) -> str:
    """What to tell a user whose policy leaves the range without moving, and what to set.

    Args:
        args: of the trainer.
        units_outside: mean share of the level's ratios outside the range.
        kl: mean KL to the old policy, in nats per token.
    """
    level, scaling = args.ratio_level, args.clip_range_scaling_in_use
    wider = {"length": "sqrt_length", "sqrt_length": "none"}.get(scaling)
    advice = "Raise `epsilon` and `epsilon_high`"
    advice += f", or set `clip_range_scaling={wider!r}`" if wider else ""
    halves = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    precision = (
        f" With `{halves}=True` two forward passes of nearly the same weights differ by rounding, which may be more."
        if halves
        else ""
    )
    return (
        f"In the last {UPDATES} updates of rollouts that had been trained on before, {units_outside:.1%} of the "
        f"{level} ratios were outside the clip range, although the KL to the old policy was only {kl:.1g} nats per "
        f"token: the range is narrower than what a policy moves that hardly moves.{precision} {advice}, until "
        f"`{clips_of(args)}` in the log is below {MOST_OUTSIDE:g} where `kl_to_old` is small."
    )


def clips_of(args: TurnLevelConfig) -> str:
    """The metric that says which share of the level's ratios is outside their range."""
    return f"clip_fraction/{args.ratio_level}"
