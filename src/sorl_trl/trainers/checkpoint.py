"""What a checkpoint holds beside TRL's, so that a resumed run goes on exactly, and how it is loaded.

TRL saves weights, optimizer and scheduler. This adds the generation cycle, which is one rollout and its updates, an
order of prompts that follows the epoch, and the settings of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.distributed.checkpoint.stateful import Stateful
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from trl.trainer.utils import RepeatSampler

from sorl_trl.command_line import UserMistake
from sorl_trl.files import write_whole
from sorl_trl.records.resume_point import checkpoint_problem, ranks_where
from sorl_trl.trainers.batch import ON_HOST
from sorl_trl.trainers.checks import warn_on_main_process

CYCLE_FILE, SETTINGS_FILE = "generation_cycle_{}.pt", "run_settings.json"
"""The first is one for each process, the second one for all."""
_CYCLE_OPTIONS = (
    *("world_size", "per_device_train_batch_size", "steps_per_generation", "num_iterations"),
    "gradient_accumulation_steps",
)
"""The fields of the configuration that determine the steps of a generation cycle."""
RESTORED = (
    *("learning_rate", "critic_learning_rate", "value_head_learning_rate", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon"),
)
"""Options that are part of the state of optimizer and scheduler. A resumed run keeps the checkpoint's values."""
_OF_TRANSFORMERS = (
    *("optim", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_grad_norm", "max_steps"),
    *("num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "seed", "bf16", "fp16"),
)
"""The options of transformers that are compared, too. Of TRL's and ours, all but `_NOT_COMPARED` are."""
_NOT_COMPARED = ("log_", "model_init_kwargs", "num_completions_to_print", "save_", "vllm_group", "vllm_server")


class EpochRepeatSampler(RepeatSampler):
    """`RepeatSampler` in which epoch e has the order of the e-th pass of an uninterrupted run.

    TRL's sampler draws a new order in every pass, and a resumed run, which counts its passes anew, repeats the first.
    """

    epoch = 0

    @classmethod
    def like(cls, sampler: RepeatSampler) -> EpochRepeatSampler:
        """A sampler with the settings of `sampler`."""
        names = ("data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed")
        return cls(**{name: getattr(sampler, name) for name in names})

    def set_epoch(self, epoch: int) -> None:
        """Data loaders call it before each pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()


def save_cycle(trainer: Any, folder: Path, ahead: Stateful | None) -> None:
    """Write into a checkpoint this process's step within the cycle, and the trajectories still to be trained on.

    TRL saves neither, and would generate new trajectories at once. `ahead` are the run's rollouts ahead, if any.
    """
    is_unfinished = trainer._step % trainer.args.cycle_steps != 0
    state = {
        "step": trainer._step,
        "buffered_inputs": trainer._buffered_inputs if is_unfinished else None,
        "ahead": None if ahead is None else ahead.state_dict(),
        **{name: getattr(trainer.args, name) for name in _CYCLE_OPTIONS},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / CYCLE_FILE.format(trainer.args.process_index), lambda file: torch.save(state, file))


def load_cycle(trainer: Any, folder: Path, ahead: Stateful | None) -> None:
    """Restore the step within the cycle, the trajectories still to be trained on, and the state of rollouts ahead.

    An iterable dataset after its first pass does not go on exactly, because transformers cannot tell how long a pass
    is; nor does what a warning names. Sums between two log entries are lost, as in transformers' own trainer.

    Raises:
        UserMistake: The checkpoint has trajectories still to be trained on, but was written by another number of
            processes, with other batch settings, or with another order of rollouts ahead.
    """
    args, file = trainer.args, folder / CYCLE_FILE.format(trainer.args.process_index)
    if without := ranks_where(not file.is_file()):  # all ranks must collect in the same steps
        warn_on_main_process(
            args,
            f"{folder} does not say to processes {without} where in a generation cycle it was written "
            "(`trl.GRPOTrainer` wrote it, or it was copied in part): the run goes on with new trajectories.",
        )
        return
    # Not straight to the device: accelerate puts several CPU processes on "cpu:0", which torch.load refuses.
    state = torch.load(file, map_location="cpu", weights_only=True)
    saved = state.get("ahead") or {}
    is_out_of_order = bool(ranks_where(bool(saved.get("late") or saved.get("early"))))
    if is_out_of_order:
        now = {} if ahead is None else ahead.state_dict()
        if ahead is None or any(now[key] != saved.get(key) for key in ("parts_of_batch", "grace")):
            raise UserMistake(
                "The checkpoint's run trained on rollouts in the order of completion: resume with the same "
                "`async_order`, `async_staleness` and batch settings, or start a new run."
            )
        ahead.load_state_dict(saved)
    changed = [name for name in _CYCLE_OPTIONS if state[name] != getattr(args, name)]
    if changed and (is_out_of_order or state["buffered_inputs"] is not None):
        raise UserMistake(
            f"`{changed[0]}` is {getattr(args, changed[0])}, but was {state[changed[0]]} when {folder} was written, "
            "with trajectories still to be trained on. Resume with the same, or start a new run."
        )
    if state["buffered_inputs"] is None:
        trainer._step = 0  # the next step begins a cycle, whose settings may differ
        return
    trainer._step = state["step"]
    trainer._buffered_inputs = send_to_device(state["buffered_inputs"], trainer.accelerator.device, skip_keys=ON_HOST)


def checkpoint_now(trainer: Any) -> Path | None:
    """The folder of the last optimizer step's checkpoint, which is written if it is missing; None if none can be.

    All processes call it together.
    """
    args, step = trainer.args, trainer.state.global_step
    # If an optimizer step takes several rollouts, it may be half done, which no checkpoint can hold.
    is_between = args.cycle_steps % args.gradient_accumulation_steps == 0
    if not (step and is_between and args.save_strategy != SaveStrategy.NO and not args.save_only_model):
        return None
    folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
    if not ranks_where(checkpoint_problem(folder) is None):
        trainer._save_checkpoint(trainer.model_wrapped, None)
        trainer.callback_handler.on_save(args, trainer.state, trainer.control)
        trainer.accelerator.wait_for_everyone()  # once one fails, the launcher ends all, even while they write
    return folder


def settings_of(trainer: Any) -> dict[str, Any]:
    """The options of a trainer that a resumed run is compared by, as JSON values."""
    args = trainer.args
    general = {field.name for field in fields(TrainingArguments)} - {*RESTORED, *_OF_TRANSFORMERS}
    names = [field.name for field in fields(args) if field.name not in general]
    found = {name: getattr(args, name) for name in names if not name.startswith(_NOT_COMPARED)}
    found |= {"trainer": type(trainer).__name__, "method": trainer.method.describe()}
    as_json: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return as_json


def save_settings(trainer: Any, checkpoint: Path) -> None:
    """Write the trainer's settings into the folder of a checkpoint."""
    write_whole(checkpoint / SETTINGS_FILE, (json.dumps(settings_of(trainer), indent=2) + "\n").encode())


def take_up_settings(trainer: Any, checkpoint: Path) -> None:
    """Log which settings differ from the checkpoint's, and set the options in `RESTORED` to the checkpoint's values.

    A checkpoint without settings, such as one of TRL's, changes nothing.

    Raises:
        UserMistake: The optimizer's state is that of another optimizer, or holds a critic, unlike this run's.
    """
    file = checkpoint / SETTINGS_FILE
    if not file.is_file():
        return
    before, now = json.loads(file.read_bytes()), settings_of(trainer)
    mistake = None
    if len({str(each.get("optim", "")).removesuffix("_fused") for each in (before, now)}) > 1:
        mistake = f"`optim` is {now['optim']!r}, but {checkpoint} holds the state of {before['optim']!r}"
    elif "critic" in before and "critic" not in now:
        mistake = f"The trainer is a {now['trainer']}, but {checkpoint} is of a {before['trainer']}, with a critic"
    if mistake:
        raise UserMistake(f"{mistake}. Resume with the same, or start a new run from the checkpoint's policy.")
    changes = []
    for name in (name for name in before if name in now and before[name] != now[name]):
        changes.append(f"`{name}` was {before[name]!r}, is {now[name]!r}")
        if name in RESTORED:
            setattr(trainer.args, name, before[name])
            changes[-1] += " (the checkpoint's goes on, as part of the optimizer's state)"
    if changes:
        warn_on_main_process(trainer.args, f"This run differs from {checkpoint}: {'; '.join(changes)}.")


def load_weights(trainer: Any, checkpoint: str, load: Callable[[], None]) -> None:
    """Load the weights of a checkpoint into the trainer's policy; `load` is how transformers does it.

    transformers saves mixtures of experts and many vision-language models under other names, and with other shapes,
    than they have in memory. `from_pretrained` converts them; `load` would leave the weights that the model began
    with. Of an adapter in bfloat16, it makes float32. Engines that shard parameters load their own checkpoints.
    """
    policy = trainer.model
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        load()
    elif isinstance(policy, PreTrainedModel):
        policy.load_state_dict(type(policy).from_pretrained(checkpoint, dtype=policy.dtype).state_dict())
    else:
        dtypes = {name: parameter.dtype for name, parameter in policy.named_parameters()}
        load()
        for name, parameter in policy.named_parameters():
            parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))
