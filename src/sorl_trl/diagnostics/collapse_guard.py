"""A callback that notices when training collapses, and warns or ends it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sorl_trl.checks import check_choice
from sorl_trl.diagnostics.collapse_detector import Alarm, CollapseDetector
from sorl_trl.diagnostics.collapse_rules import DEFAULT_RULES, NotFinite, Rule

logger = logging.getLogger(__name__)

ACTIONS = ("warn", "stop")
ALARMS = "guard/alarms"


class CollapseGuard(TrainerCallback):
    """Watches the log of a run, and acts when a rule of `CollapseDetector` fires.

    - `"warn"`: log a warning.
    - `"stop"`: also write a checkpoint (unless `save_strategy` is "no") and end training.

    After an alarm of `NotFinite`, no checkpoint is written. With `fp16`, these rules are left out, because gradient
    norms that are not finite are common there and the gradient scaler skips such steps.

    The log entries of alarms get `guard/alarms`, which loggers that were called before this callback do not see.

    Raises:
        ValueError: `action` is unknown, or, when training begins, the run logs nothing.
    """

    def __init__(self, action: str = "warn", rules: Iterable[Rule] = DEFAULT_RULES) -> None:
        check_choice("action", action, ACTIONS)
        self.action = action
        self.rules = tuple(rules)
        self._detector: CollapseDetector | None = None
        """The detector of the run, once training has begun."""
        self.alarms: list[Alarm] = []
        """All alarms so far."""
        self.is_broken = False
        """Whether it has stopped a run whose weights may be NaN."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.logging_strategy == "no":
            raise ValueError("`logging_strategy` is 'no', but CollapseGuard reads log entries: set it to 'steps'.")
        self._detector = detector = CollapseDetector(
            rule for rule in self.rules if not (args.fp16 and isinstance(rule, NotFinite))
        )
        self.is_broken = False
        # A resumed run starts with its earlier alarms.
        self.alarms = [alarm for entry in state.log_history for alarm in detector.observe(entry)]
        detector.holding.clear()  # what stopped the run may not have been fixed, and should fire again

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._detector is None:  # an evaluation before training
            return
        entry = state.log_history[-1]  # it has the step, which `logs` lacks
        alarms: list[Alarm] = _from_main_process(self._detector.observe(entry))
        if not alarms:
            return
        self.alarms += alarms
        entry[ALARMS] = kwargs["logs"][ALARMS] = len(alarms)
        for alarm in alarms:
            _warn(state, alarm.message)
        if self.action == "stop":
            _warn(state, "CollapseGuard stops training.")
            control.should_training_stop = True
            self.is_broken = any(isinstance(alarm.rule, NotFinite) for alarm in alarms)
            control.should_save = args.save_strategy != "no" and not self.is_broken


def _from_main_process(value: Any) -> Any:
    """The main process's `value`, so that all ranks act alike."""
    box = [value]
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(box, src=0)
    return box[0]


def _warn(state: TrainerState, message: str) -> None:
    if state.is_world_process_zero:
        logger.warning(message)
