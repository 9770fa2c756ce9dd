"""Notices a clip range that the ratios of turns or sequences never leave."""

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


class RangeWatch(TrainerCallback):
    """Warns once where token ratios leave the clip range and those of the level never do: nothing is clipped then.

    One unit outside the range, once, however short, silences it for the rest of the run: it finds ranges that nothing
    leaves, not those that only the long units never leave.

    It reads what `MetricLog` has reduced over all ranks, so that all see the same. A resumed run counts its updates
    anew, and says nothing if the log of the run before has a unit outside the range.

    Args:
        args: of the trainer.
        metric_log: of the trainer, which observes each micro-batch before this does.
    """

    def __init__(self, args: TurnLevelConfig, metric_log: MetricLog) -> None:
        self.args = args
        self._metric_log = metric_log
        self._metric = clips_of(args)
        self._tokens_outside: deque[float] = deque(maxlen=UPDATES)
        self._is_done = args.ratio_level == "token" or args.loss_type in LOSSES_WITHOUT_MIN

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What an earlier part of the run has logged counts."""
        self._is_done |= any((entry.get(self._metric) or 0.0) > 0 for entry in state.log_history)

    def observe(self, batch: MicroBatch) -> None:
        """Look at an update when it ends, and warn after `UPDATES` of them."""
        if self._is_done or batch.age is None or not batch.ends_step:
            return
        # In the first update of a rollout every ratio is 1.
        moved = [metrics for age, metrics in self._metric_log.of_last_step if age]
        if any(metrics[self._metric] > 0 for metrics in moved):
            self._is_done = True
            return
        tokens_outside = mean_of_numbers([metrics["clip_fraction/token"] for metrics in moved])
        if not math.isnan(tokens_outside):
            self._tokens_outside.append(tokens_outside)
        mean = mean_of_numbers(self._tokens_outside)
        if len(self._tokens_outside) == UPDATES and mean > TOKENS_OUTSIDE:
            self._is_done = True
            logger.warning(range_warning(self.args, mean))


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


def clips_of(args: TurnLevelConfig) -> str:
    """The metric that says which share of the level's ratios is outside their range."""
    return f"clip_fraction/{args.ratio_level}"
