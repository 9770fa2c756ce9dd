"""Callbacks that monitor a run: a guard against collapse, and a progress bar with the key metrics."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import broadcast_object_list
from tqdm.contrib.logging import logging_redirect_tqdm
from tqdm.std import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sorl_trl.checks import check_choice
from sorl_trl.command_line import is_first_process
from sorl_trl.diagnostics.collapse import DEFAULT_RULES, Alarm, CollapseDetector, Rule
from sorl_trl.text import one_line

logger = logging.getLogger(__name__)

ACTIONS = ("warn", "stop")
ALARMS = "guard/alarms"
SHOWN = {
    "reward": "reward",
    "clip": "clip_ratio/region_mean",
    "kl": "kl_to_old",
    "turns": "turns/per_trajectory",
    "entropy": "entropy",
}
"""Metrics of docs/reference/metrics.md, by their label in the bar."""


class CollapseGuard(TrainerCallback):
    """Watches the log of a run, and acts when a rule of `CollapseDetector` fires.

    - `"warn"`: log a warning.
    - `"stop"`: also write a checkpoint (unless `save_strategy` is "no") and end training.

    After an alarm for non-finite numbers, no checkpoint is written. With `fp16`, such rules are left out, because
    non-finite gradient norms are common there and the gradient scaler skips such steps.

    Log entries with alarms get `guard/alarms`; loggers called before this callback do not see it.

    To add a rule, with functions of `sorl_trl.diagnostics.collapse`:

    ```python
    entropy = Rule("low_entropy", {"entropy": partial(fall, share=0.5, minimum=0.05)}, "lower the learning rate")
    guard = CollapseGuard("stop", rules=(*DEFAULT_RULES, entropy))
    ```

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
        """Whether it stopped a run because its weights may be NaN."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.logging_strategy == "no":
            raise ValueError("`logging_strategy` is 'no', but CollapseGuard reads log entries: set it to 'steps'.")
        self._detector = detector = CollapseDetector(rule for rule in self.rules if not (args.fp16 and rule.at_once))
        self.is_broken = False
        # A resumed run starts with its earlier alarms.
        self.alarms = [alarm for entry in state.log_history for alarm in detector.observe(entry)]
        detector.holding.clear()  # what stopped the run may not have been fixed, and should fire again

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._detector is None:  # an evaluation before training
            return
        entry = state.log_history[-1]  # it has the step, which `logs` lacks
        # The main process's, so that all ranks act alike.
        alarms: list[Alarm] = broadcast_object_list([self._detector.observe(entry)])[0]
        if not alarms:
            return
        self.alarms += alarms
        entry[ALARMS] = kwargs["logs"][ALARMS] = len(alarms)
        for alarm in alarms:
            _warn(state, alarm.message)
        if self.action == "stop":
            _warn(state, "CollapseGuard stops training.")
            control.should_training_stop = True
            fired = {alarm.rule for alarm in alarms}
            self.is_broken = any(rule.at_once and rule.name in fired for rule in self.rules)
            control.should_save = args.save_strategy != "no" and not self.is_broken


def _warn(state: TrainerState, message: str) -> None:
    if state.is_world_process_zero:
        logger.warning(message)


class TurnProgressCallback(ProgressCallback):
    """transformers' `ProgressCallback`, with the key metrics beside the bar. `trainer_state.json` has all metrics.

    TRL logs rollout metrics only on the steps that generate, so the bar keeps showing the last known values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: dict[str, str] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        shown = {label: logs[metric] for label, metric in SHOWN.items() if isinstance(logs.get(metric), float)}
        self._latest |= {label: f"{value:.3f}" for label, value in shown.items()}
        if self.training_bar is not None:  # on the main process, in training
            self.training_bar.set_postfix(self._latest)


@contextmanager
def whole_lines() -> Iterator[None]:
    """Context in which every warning and log message is printed on its own line above the bar, once per machine.

    At the end, bars that an error left open are closed, so that later output begins on a new line.
    """

    def show(message: Warning | str, *_: Any) -> None:
        if is_first_process():
            tqdm.write(f"warning: {one_line(message)}", file=sys.stderr)

    loggers = [logging.getLogger(), logging.getLogger("transformers")]
    with warnings.catch_warnings(), logging_redirect_tqdm(loggers):
        warnings.showwarning = show  # type: ignore[assignment]
        # Future changes of libraries concern those who call them, not our users.
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|trl|accelerate|torch")
        try:
            yield
        finally:
            for bar in [*tqdm._instances]:
                bar.close()
