"""A callback that notices when training collapses, and does something about it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from sorl_trl.checks import check_choice
from sorl_trl.diagnostics.collapse_detector import Alarm, CollapseDetector
from sorl_trl.diagnostics.collapse_rules import DEFAULT_RULES, MASKED_METRIC, NotFinite, Rule
from sorl_trl.learning_rate import check_scheduler, scale_learning_rate

logger = logging.getLogger(__name__)

ACTIONS = ("warn", "stop", "roll_back")
ALARMS = "guard/alarms"
INTERVENTIONS = "guard/interventions"

LR_FACTOR = 0.5
"""By what going back multiplies the learning rates."""
MAX_INTERVENTIONS = 3
"""The alarm after so many stops training."""
COOLDOWN = 5
"""Iterations after going back that the rules do not see. Iterations are those of the detector."""
MARGIN = 5
"""A checkpoint is healthy if no alarm came in so many iterations after its own, of those that the rules saw."""


class CollapseGuard(TrainerCallback):
    """Watches the log of a run, and acts when a rule of `CollapseDetector` fires.

    - `"warn"`: log a warning. The other actions do so too.
    - `"stop"`: write a checkpoint (unless `save_strategy` is "no") and end training.
    - `"roll_back"`: go back to the newest healthy checkpoint and halve the learning rates. The step counts on, and the
      rules start anew. Where nothing can be trained on, after three times, or without a healthy checkpoint, stop.

    After an alarm of `NotFinite`, a stop writes no checkpoint. With `fp16` these rules are left out: gradient norms
    that are no numbers are usual there, and the gradient scaler leaves such steps out.

    The log entries of alarms get `guard/alarms` and `guard/interventions`, from which a resumed run learns what has
    been; loggers that were called before this callback do not see them.

    Args:
        action: one of the above.
        trainer: for `"roll_back"`, whose trainer must have `roll_back(checkpoint)`, as those of this package do.
        rules: what fires.

    Raises:
        ValueError: `action` is unknown, or `trainer` cannot roll back or writes no checkpoints to go back to. When
            training begins: it logs nothing, or the schedule does not let its learning rates be lowered.
    """

    def __init__(self, action: str = "warn", trainer: Any = None, rules: Iterable[Rule] = DEFAULT_RULES) -> None:
        check_choice("action", action, ACTIONS)
        if action == "roll_back":
            _check_trainer(trainer)
        self.action = action
        self.trainer = trainer
        self.rules = tuple(rules)
        self.alarms: list[Alarm] = []
        """All that have fired."""
        self.is_broken = False
        """Whether it has stopped a run whose policy may have lost its numbers."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.logging_strategy == "no":
            raise ValueError("`logging_strategy` is 'no', but CollapseGuard reads log entries: set it to 'steps'.")
        if self.action == "roll_back":
            check_scheduler(kwargs["lr_scheduler"])
        self._detector = CollapseDetector(
            rule for rule in self.rules if not (args.fp16 and isinstance(rule, NotFinite))
        )
        self.alarms.clear()
        self.is_broken = False
        for entry in state.log_history:  # of the run that is resumed
            self.alarms += self._detector.observe(entry)
            if INTERVENTIONS in entry:
                self._detector.restart(COOLDOWN)
        self._detector.holding.clear()  # what made it stop may not have been mended
        self._saved = list(range(state.global_step + 1))  # all that the resumed run may have saved

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._saved.append(state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        entry = state.log_history[-1]  # with the step, which `logs` does not have
        alarms: list[Alarm] = _from_main_process(self._detector.observe(entry))
        if not alarms:
            return
        self.alarms += alarms
        for alarm in alarms:
            _warn(state, alarm.message)
        entry[ALARMS] = len(alarms)
        if self.action != "warn":
            self._act(args, state, control, alarms)
        kwargs["logs"].update({name: entry[name] for name in (ALARMS, INTERVENTIONS) if name in entry})

    def _act(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, alarms: list[Alarm]) -> None:
        """Go back, or stop."""
        interventions = [int(entry["step"]) for entry in state.log_history if INTERVENTIONS in entry]
        destination = self._destination(args, alarms, len(interventions))
        if isinstance(destination, Path):
            self._go_back(destination, state, interventions)
            state.log_history[-1][INTERVENTIONS] = len(interventions) + 1
            self._detector.restart(COOLDOWN)
            return
        _warn(state, f"CollapseGuard stops training: {destination}.")
        control.should_training_stop = True
        self.is_broken = any(isinstance(alarm.rule, NotFinite) for alarm in alarms)
        control.should_save = args.save_strategy != "no" and not self.is_broken

    def _destination(self, args: TrainingArguments, alarms: list[Alarm], interventions: int) -> Path | str:
        """The checkpoint to go back to, or why to stop."""
        if self.action == "stop":
            return "`action` is 'stop'"
        if any(alarm.rule.metric == MASKED_METRIC for alarm in alarms):
            return "nothing can be trained on, and going back does not change that"
        if interventions >= MAX_INTERVENTIONS:
            return f"it has gone back {interventions} times"
        return self._healthy_checkpoint(args) or (
            f"no checkpoint is left from more than {MARGIN} iterations before an alarm. Save more often, and keep "
            "more (`save_steps`, `save_total_limit`)"
        )

    def _healthy_checkpoint(self, args: TrainingArguments) -> Path | None:
        """The newest that is still there and after which no alarm came soon, as the main process sees it."""
        steps = (step for step in reversed(self._saved) if self._is_healthy(step))
        folders = (Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{step}" for step in steps)
        present = (folder for folder in folders if (folder / TRAINER_STATE_NAME).is_file())
        newest: Path | None = _from_main_process(next(present, None))
        return newest

    def _is_healthy(self, step: int) -> bool:
        """Whether no alarm came soon after `step`: alarms come late, but those of `NotFinite` in the same iteration.

        A checkpoint that is written at the first step of an iteration has trained on that iteration's rollout.
        """
        for alarm in self.alarms:
            judged = sum(step < each <= alarm.step for each in self._detector.judged)
            soon = 0 if isinstance(alarm.rule, NotFinite) else 1 + MARGIN  # 1: the checkpoint's own iteration
            if step <= alarm.step and judged <= soon:
                return False
        return True

    def _go_back(self, checkpoint: Path, state: TrainerState, interventions: list[int]) -> None:
        """Restore `checkpoint`, and lower its learning rates, which know nothing of the interventions since."""
        self.trainer.roll_back(checkpoint)
        saved_at = int(checkpoint.name.rpartition("-")[2])
        factor = LR_FACTOR ** (1 + sum(step > saved_at for step in interventions))
        scale_learning_rate(self.trainer.optimizer, self.trainer.lr_scheduler, factor)
        _warn(state, f"CollapseGuard has gone back to {checkpoint}, and multiplied its learning rates by {factor:g}.")


def _check_trainer(trainer: Any) -> None:
    if not hasattr(trainer, "roll_back"):
        raise ValueError(f"`trainer` is a {type(trainer).__name__}, which has no `roll_back(checkpoint)`.")
    if trainer.args.save_strategy == "no" or trainer.args.save_only_model:
        raise ValueError("`save_strategy` is 'no' or `save_only_model` is True, but `roll_back` needs checkpoints.")


def _from_main_process(value: Any) -> Any:
    """The main process's `value`, so that all ranks do the same."""
    box = [value]
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(box, src=0)
    return box[0]


def _warn(state: TrainerState, message: str) -> None:
    if state.is_world_process_zero:
        logger.warning(message)
