"""A callback that notices when training collapses, and does something about it."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from sorl_trl.checks import COUNT, Number, check_choice, check_fields
from sorl_trl.diagnostics.collapse_detector import Alarm, CollapseDetector
from sorl_trl.diagnostics.collapse_rules import DEFAULT_RULES, NotFinite, Rule
from sorl_trl.learning_rate import check_scheduler, scale_learning_rate

logger = logging.getLogger(__name__)

T = TypeVar("T")

ACTIONS = ("warn", "stop", "lower_lr", "roll_back")
ALARMS = "guard/alarms"
INTERVENTIONS = "guard/interventions"


@dataclass(frozen=True)
class GuardSettings:
    """How `CollapseGuard` intervenes with `action="lower_lr"` and `"roll_back"`. Iterations are those of the detector.

    Raises:
        ValueError: a field is out of range.
    """

    lr_factor: Annotated[float, Number(above=0, below=1)] = 0.5
    """By what each intervention multiplies the learning rates."""
    max_interventions: Annotated[int, COUNT] = 3
    """The alarm after so many stops training."""
    cooldown: Annotated[int, COUNT] = 5
    """Iterations after an intervention that the rules do not see."""
    margin: Annotated[int, COUNT] = 5
    """A checkpoint is healthy if no alarm came in so many iterations after it, those that the rules saw: alarms come
    late. One of `NotFinite` comes in the same iteration."""

    def __post_init__(self) -> None:
        check_fields(self)


class CollapseGuard(TrainerCallback):
    """Watches the log of a run, and acts when a rule of `CollapseDetector` fires.

    - `"warn"`: log a warning. The other actions do so too.
    - `"stop"`: write a checkpoint (unless `save_strategy` is "no") and end training.
    - `"lower_lr"`: multiply all learning rates by `lr_factor`, for the rest of the schedule.
    - `"roll_back"`: go back to the newest healthy checkpoint and lower the learning rates. The step counts on.

    Where a cause lies outside of the policy, after `max_interventions`, or without a healthy checkpoint, the last two
    stop. After an intervention the rules start anew.

    After an alarm of `NotFinite`, `"lower_lr"` stops, and a stop writes no checkpoint. With `fp16`, gradient norms
    that are no numbers are usual, and do not count: the gradient scaler leaves such steps out.

    The log entries of alarms get `guard/alarms` and `guard/interventions`, from which a resumed run learns what has
    been; loggers that were called before this callback do not see them.

    Args:
        action: one of the above.
        trainer: for `"roll_back"`, whose trainer must have `roll_back(checkpoint)`, as those of this package do.
        rules: what fires.
        settings: of `"lower_lr"` and `"roll_back"`.

    Raises:
        ValueError: `action` is unknown, or `trainer` cannot roll back or writes no checkpoints to go back to. When
            training begins: it logs nothing, or the schedule does not let its learning rates be lowered.
    """

    def __init__(
        self,
        action: str = "warn",
        trainer: Any = None,
        rules: Iterable[Rule] = DEFAULT_RULES,
        settings: GuardSettings | None = None,
    ) -> None:
        check_choice("action", action, ACTIONS)
        if action == "roll_back":
            _check_trainer(trainer)
        self.action = action
        self.trainer = trainer
        self.settings = settings or GuardSettings()
        self.rules = tuple(rules)
        self._forget()

    def _forget(self) -> None:
        self._detector = CollapseDetector(self.rules)
        self.alarms: list[Alarm] = []
        """All that have fired."""
        self._interventions: list[int] = []  # steps
        self._checkpoints: set[int] = set()  # steps

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.logging_strategy == "no":
            raise ValueError("`logging_strategy` is 'no', but CollapseGuard reads log entries: set it to 'steps'.")
        if self.action in ("lower_lr", "roll_back"):
            check_scheduler(kwargs["lr_scheduler"])
        self._forget()
        for entry in state.log_history:  # of the run that is resumed
            self.alarms += self._observe(args, entry)
            if INTERVENTIONS in entry:
                self._note_intervention(int(entry["step"]))
        self._detector.rearm()  # what made it stop may not have been mended
        if state.global_step:
            self._checkpoints = {step for step in _steps_on_disk(args) if step <= state.global_step}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._checkpoints.add(state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        entry = state.log_history[-1]  # with the step, which `logs` does not have
        alarms = _from_main_process(self._observe(args, entry))
        if not alarms:
            return
        self.alarms += alarms
        for alarm in alarms:
            _warn(state, alarm.message)
        marks = {ALARMS: len(alarms)}
        if self._intervene(args, state, control, alarms, **kwargs):
            self._note_intervention(state.global_step)
            marks[INTERVENTIONS] = len(self._interventions)
        entry.update(marks)
        kwargs["logs"].update(marks)

    def _observe(self, args: TrainingArguments, entry: dict[str, Any]) -> list[Alarm]:
        return self._detector.observe({**entry, "grad_norm": None} if args.fp16 and "grad_norm" in entry else entry)

    def _intervene(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, alarms: list[Alarm], **kwargs: Any
    ) -> bool:
        """Act as `action` says; whether training goes on in another state."""
        if self.action == "warn":
            return False
        checkpoint = self._healthy_checkpoint(args, state) if self.action == "roll_back" else None
        reason = self._reason_to_stop(alarms, checkpoint)
        if reason is not None:
            _warn(state, f"CollapseGuard stops training: {reason}.")
            control.should_training_stop = True
            control.should_save = not _not_finite(alarms) and (control.should_save or args.save_strategy != "no")
            return False
        lowered = self.settings.lr_factor
        if checkpoint is not None:
            lowered = self._go_back(checkpoint)
            _warn(state, f"CollapseGuard has gone back to {checkpoint}.")
        scale_learning_rate(kwargs["optimizer"], kwargs["lr_scheduler"], lowered)
        _warn(state, f"CollapseGuard has multiplied the learning rates by {lowered:g}.")
        return True

    def _go_back(self, checkpoint: Path) -> float:
        """Restore `checkpoint`; by what to lower its learning rates, which know nothing of the interventions since."""
        self.trainer.roll_back(checkpoint)
        saved_at = int(checkpoint.name.rpartition("-")[2])
        undone = sum(step > saved_at for step in self._interventions)
        return float(self.settings.lr_factor ** (1 + undone))

    def _reason_to_stop(self, alarms: list[Alarm], checkpoint: Path | None) -> str | None:
        if self.action == "stop":
            return "`action` is 'stop'"
        outside = [alarm.rule.name for alarm in alarms if alarm.rule.from_outside]
        if outside:
            return f"what {outside[0]} tells of is not for `action={self.action!r}` to mend"
        if self.action == "lower_lr" and _not_finite(alarms):
            return "no learning rate mends weights that are no numbers"
        if len(self._interventions) >= self.settings.max_interventions:
            return f"`max_interventions={self.settings.max_interventions}` have been made"
        if self.action == "roll_back" and checkpoint is None:
            return (
                f"no checkpoint is left from more than `margin={self.settings.margin}` iterations before an alarm. "
                "Save more often, and keep more (`save_steps`, "
                "`save_total_limit`)"
            )
        return None

    def _note_intervention(self, step: int) -> None:
        self._interventions.append(step)
        self._detector.restart(self.settings.cooldown)

    def _healthy_checkpoint(self, args: TrainingArguments, state: TrainerState) -> Path | None:
        """The newest that is still there and after which no alarm came soon."""
        newest = None
        if state.is_world_process_zero:
            steps = sorted(self._checkpoints, reverse=True)
            folders = ((step, Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{step}") for step in steps)
            newest = next((folder for step, folder in folders if self._is_healthy(step, folder)), None)
        return _from_main_process(newest)

    def _is_healthy(self, step: int, folder: Path) -> bool:
        """A checkpoint that is written at the first step of an iteration has trained on that iteration's rollout."""
        judged = self._detector.judged
        iteration = bisect_right(self._detector.starts, step) - 1
        before = bisect_right(judged, iteration)
        for alarm in self.alarms:
            is_late = bisect_right(judged, alarm.iteration) - before <= self.settings.margin
            if isinstance(alarm.rule, NotFinite):  # which comes at once
                is_late = alarm.iteration == iteration
            if step <= alarm.step and is_late:
                return False
        return (folder / TRAINER_STATE_NAME).is_file()


def _not_finite(alarms: list[Alarm]) -> bool:
    return any(isinstance(alarm.rule, NotFinite) for alarm in alarms)


def _check_trainer(trainer: Any) -> None:
    needed = "but `action='roll_back'` needs"
    if not callable(getattr(trainer, "roll_back", None)):
        raise ValueError(
            f"`trainer` is a {type(trainer).__name__}, {needed} one with `roll_back(checkpoint)`, such as "
            "SOGRPOTrainer or SOPPOTrainer."
        )
    if trainer.args.save_strategy == "no":
        raise ValueError(f"`save_strategy` is 'no', {needed} checkpoints: set it to 'steps'.")
    if trainer.args.save_only_model:
        raise ValueError(f"`save_only_model` is True, {needed} the optimizer too: set it to False.")


def _steps_on_disk(args: TrainingArguments) -> set[int]:
    """Of all checkpoints in the output folder."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    names = (folder.name.removeprefix(prefix) for folder in Path(str(args.output_dir)).glob(f"{prefix}*"))
    return {int(name) for name in names if name.isdecimal()}


def _from_main_process(value: T) -> T:
    """The main process's `value`, so that all ranks do the same."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def _warn(state: TrainerState, message: str) -> None:
    if state.is_world_process_zero:
        logger.warning(message)
