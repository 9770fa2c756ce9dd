"""What a checkpoint holds besides TRL's state, how it is found and checked, and how a run continues from it exactly.

TRL saves weights, optimizer and scheduler. This module adds the generation cycle (one rollout and its updates) and an
order of prompts that follows the epoch. `critic_checkpoint.py` adds the critic.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

import torch
from accelerate.utils import gather_object, send_to_device
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, has_length
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from trl.trainer.utils import RepeatSampler

from sorl_trl.command_line import UserMistake
from sorl_trl.files import write_whole
from sorl_trl.records import checkpoints
from sorl_trl.trainers.batch import ON_HOST
from sorl_trl.trainers.checks import warn_on_main_process
from sorl_trl.trainers.config import TurnLevelConfig
from sorl_trl.trainers.host import Host

if TYPE_CHECKING:
    from sorl_trl.trainers.late_rollouts import RolloutsAhead

CYCLE_FILE = "generation_cycle_{}.pt"
"""One for each process."""
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
_WEIGHTS = (
    *(SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME),
    *("adapter_model.safetensors", "adapter_model.bin"),
)
_PARTS = (OPTIMIZER_NAME, SCHEDULER_NAME)
_NAME = re.compile(r"checkpoint-(\d+)")


# -------------------------------------------------------------------------------------------------------------------
# Continuing
# -------------------------------------------------------------------------------------------------------------------


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


class Continuation(TrainerCallback):
    """Begins a run where its checkpoint ended: in the order of its epoch, and with this run's settings.

    `ahead`: the run's asynchronous rollouts, if any.
    """

    def __init__(self, ahead: RolloutsAhead | None) -> None:
        self._ahead = ahead

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        loader, accumulated = given["train_dataloader"], args.gradient_accumulation_steps
        state.compute_steps(args, state.max_steps)
        if state.global_step and state.global_step >= state.max_steps:
            at = f"The checkpoint is at step {state.global_step}"
            warn_on_main_process(args, f"{at}, but `max_steps` is {state.max_steps}: raise it to continue.")
        # In a resumed run of several processes, transformers wraps the sampler once more before it sets the epoch.
        length = len(loader) if has_length(loader) else sys.maxsize
        epoch, updates = divmod(state.global_step, max(math.ceil(length / accumulated), 1))
        loader.set_epoch(epoch)
        if self._ahead is not None:
            self._ahead.begin_at(epoch * length + (0 if args.ignore_data_skip else updates * accumulated))


def save_cycle(host: Host, folder: Path) -> None:
    """Write into a checkpoint this process's step within the cycle, and the trajectories still to be trained on.

    TRL saves neither, and would generate new trajectories at once.
    """
    args, (step, buffered) = host.args, host.cycle
    state = {
        "step": step,
        "buffered_inputs": buffered if step % args.cycle_steps else None,
        "ahead": None if host.ahead is None else host.ahead.state_dict(),
        "optim": _kind_of_optimizer(args),
        "has_critic": host.has_critic,
        **{name: getattr(args, name) for name in (*_CYCLE_OPTIONS, *RESTORED) if hasattr(args, name)},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / CYCLE_FILE.format(args.process_index), lambda file: torch.save(state, file))


def load_cycle(host: Host, folder: Path) -> None:
    """Restore the step within the cycle, the trajectories still to be trained on, and asynchronous rollouts.

    The options in `RESTORED` are set to the checkpoint's values, because they are part of the optimizer's state. An
    iterable dataset after its first pass does not continue exactly, because transformers cannot tell how long a pass
    is; other inexact cases are named in a warning. Sums between two log entries are lost, as in transformers' own
    trainer.

    Raises:
        UserMistake: The checkpoint has the state of another optimizer or trainer; or it has trajectories still to be
            trained on, but was written by a different number of processes, with other batch settings, or with another
            `async_order`.
    """
    args, ahead, file = host.args, host.ahead, folder / CYCLE_FILE.format(host.args.process_index)
    if without := ranks_where(not file.is_file()):  # all ranks must collect in the same steps
        warn_on_main_process(
            args,
            f"{folder} has no generation-cycle file for processes {without} (it was written by `trl.GRPOTrainer`, or "
            "copied in part): the run continues with new trajectories.",
        )
        return
    # Not straight to the device: accelerate puts several CPU processes on "cpu:0", which torch.load refuses.
    state = torch.load(file, map_location="cpu", weights_only=True)
    if state.get("optim") not in (None, optimizer := _kind_of_optimizer(args)):
        raise UserMistake(f"`optim` is {optimizer!r}, but {folder} holds the state of {state['optim']!r}.")
    if state.get("has_critic", host.has_critic) != host.has_critic:
        raise UserMistake(f"{folder} is from another trainer, with{'' if state['has_critic'] else 'out'} a critic.")
    _restore_options(args, state)
    saved = state.get("ahead") or {}
    is_out_of_order = bool(ranks_where(bool(saved.get("late") or saved.get("early"))))
    now = {} if ahead is None else ahead.state_dict()
    is_same = bool(now) and all(now[key] == saved.get(key) for key in ("parts_of_batch", "grace", "staleness"))
    if is_out_of_order and not is_same:
        raise UserMistake(
            "The checkpoint's run trained on rollouts in the order of completion: resume with the same "
            "`async_order`, `async_staleness` and batch settings, or start a new run."
        )
    changed = [name for name in _CYCLE_OPTIONS if state[name] != getattr(args, name)]
    if changed and (is_out_of_order or state["buffered_inputs"] is not None):
        raise UserMistake(
            f"`{changed[0]}` is {getattr(args, changed[0])}, but was {state[changed[0]]} when {folder} was written, "
            "with trajectories still to be trained on. Resume with the same, or start a new run."
        )
    if ahead is not None and is_same and not changed:
        ahead.load_state_dict(saved)
    elif saved.get("kept"):
        warn_on_main_process(
            args, "Settings of batches or asynchronous rollouts have changed: rollouts in progress are sampled anew."
        )
    if state["buffered_inputs"] is not None:  # otherwise the next step begins a cycle, whose settings may differ
        host.cycle = (
            state["step"],
            send_to_device(state["buffered_inputs"], host.accelerator.device, skip_keys=ON_HOST),
        )


def _kind_of_optimizer(args: TurnLevelConfig) -> str:
    """`optim`, without the "fused" of kernels, which have the same state."""
    return str(getattr(args.optim, "value", args.optim)).removesuffix("_fused")


def _restore_options(args: TurnLevelConfig, state: Mapping[str, Any]) -> None:
    changes = [name for name in RESTORED if name in state and state[name] != getattr(args, name, state[name])]
    for name in changes:
        setattr(args, name, state[name])
    if changes:
        restored = ", ".join(f"`{name}` {state[name]}" for name in changes)
        warn_on_main_process(
            args, f"These options keep the checkpoint's values, as part of the optimizer's state: {restored}."
        )


def checkpoint_now(host: Host) -> Path | None:
    """The folder of the last optimizer step's checkpoint, written now if it is missing; None if it cannot be written.

    All processes call it together.
    """
    args, step = host.args, host.step
    # An optimizer step that takes several rollouts may be half done, and a checkpoint cannot hold that.
    is_between = args.cycle_steps % args.gradient_accumulation_steps == 0
    if not (step and is_between and args.save_strategy != SaveStrategy.NO and not args.save_only_model):
        return None
    folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
    if not ranks_where(checkpoint_problem(folder) is None):
        host.save_checkpoint()
        host.accelerator.wait_for_everyone()  # once one fails, the launcher ends all, even while they write
    return folder


def load_weights(host: Host, checkpoint: str, load: Callable[[], None]) -> None:
    """Load a checkpoint's weights into the policy, with transformers' `load` where that is correct.

    transformers saves mixtures of experts and many vision-language models under other names, and with other shapes,
    than they have in memory. `from_pretrained` converts them; `load` does not, and would leave the initial weights in
    place. PEFT would load a bfloat16 adapter in float32, so parameters are cast back to their dtypes. Engines that
    shard parameters load their own checkpoints.
    """
    policy, saved = host.model, set[str]()
    if host.has_engine:
        load()
        return
    for path in Path(checkpoint).glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            saved |= {*file.keys()}
    if isinstance(policy, PreTrainedModel) and not saved <= {*policy.state_dict()}:
        policy.load_state_dict(type(policy).from_pretrained(checkpoint, dtype=policy.dtype).state_dict())
        return
    before = {name: parameter.dtype for name, parameter in policy.named_parameters()}
    load()
    for name, parameter in policy.named_parameters():
        parameter.data = parameter.data.to(before.get(name, parameter.dtype))


# -------------------------------------------------------------------------------------------------------------------
# Finding a checkpoint that is complete, and the same on all processes
# -------------------------------------------------------------------------------------------------------------------


def ranks_where(holds: bool) -> list[int]:
    """The ranks on which `holds` is True. All ranks must call it together."""
    return [rank for rank, each in enumerate(gather_object([holds])) if each]


def resume_point(args: TrainingArguments, checkpoint: str | Path | bool | None) -> str | None:
    """The folder of the checkpoint to resume from, or None for a new run. All ranks must call it together.

    Args:
        args: The trainer's arguments.
        checkpoint: A folder; or True, "true" or "latest" for the newest fully written checkpoint in the output folder.
            Anything false starts a new run.

    Raises:
        ValueError: On all ranks, if ranks see different checkpoints or some see none, or if a file is missing or
            damaged. The message names the file and the newest complete checkpoint.
    """
    if not checkpoint or checkpoint in ("false", "False"):
        return None
    output, folder = Path(str(args.output_dir)), Path(str(checkpoint))
    if checkpoint in (True, "latest", "true", "True"):
        folder = newest(output) or output
    problem = checkpoint_problem(folder) if folder != output else f"there is no checkpoint in {output}"
    seen = gather_object([None if problem else folder.name])
    if len(set(seen)) > 1:
        found = ", ".join(f"{name or 'none'} on process {rank}" for rank, name in enumerate(seen))
        raise ValueError(
            f"`resume_from_checkpoint` is {checkpoint!r}, but not all processes see the same complete checkpoint: "
            f"{found}. Use storage that all machines share, or copy the parts from all machines to each of them."
        )
    if problem:
        whole = newest_whole(folder.parent if _NAME.fullmatch(folder.name) else output)
        instead = (
            f"the newest complete checkpoint is {whole}" if whole else "there is no complete checkpoint to resume from"
        )
        raise ValueError(f"`resume_from_checkpoint` is {checkpoint!r}, but {problem}; {instead}.")
    return str(folder)


def newest(folder: Path) -> Path | None:
    """The newest fully written checkpoint of a run."""
    return next((path for path in checkpoints(folder) if (path / TRAINER_STATE_NAME).is_file()), None)


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint of a run that can be resumed."""
    return next((path for path in checkpoints(folder) if checkpoint_problem(path) is None), None)


def checkpoint_problem(folder: Path) -> str | None:
    """The first problem of a checkpoint, such as a missing or damaged file; None if it seems complete."""
    return next(_problems(folder), None)


def _problems(folder: Path) -> Iterator[str]:
    state = folder / TRAINER_STATE_NAME
    if not state.is_file():  # transformers writes it last
        yield f"{folder} is incomplete: {TRAINER_STATE_NAME} is missing"
    sharded = [*folder.glob("global_step*"), *folder.glob("pytorch_model_fsdp*")]  # by DeepSpeed, or by FSDP
    if not sharded:
        yield from (f"{folder / name} is missing" for name in _PARTS if not (folder / name).is_file())
        if not any((folder / name).is_file() for name in _WEIGHTS):
            yield f"{folder} has no weights, such as {SAFE_WEIGHTS_NAME}"
    elif sharded[0].name.startswith("global_step") and not (folder / "latest").is_file():
        yield f"{folder / 'latest'} is missing, which points DeepSpeed to its shards"
    yield from (f"{folder / name}.pth is missing" for name in _missing_rng_states(folder))
    yield from (f"{file} is empty or damaged" for file in sorted(folder.rglob("*")) if _is_damaged(file))
    for index in folder.rglob("*.safetensors.index.json"):
        shards = sorted({*json.loads(index.read_bytes())["weight_map"].values()})
        yield from (f"{index.parent / name} is missing" for name in shards if not (index.parent / name).is_file())


def _missing_rng_states(folder: Path) -> list[str]:
    """The random states that a checkpoint lacks: one for each process with a cycle file, and at least one.

    Without its random state, a process would draw different samples, and transformers would not report it.
    """
    states = {file.stem for file in folder.glob("rng_state*.pth")}
    if "rng_state" in states:  # of a single process
        return []
    ranks = [file.stem.removeprefix("generation_cycle_") for file in sorted(folder.glob("generation_cycle_*.pt"))]
    wanted = [f"rng_state_{rank}" for rank in ranks] if states or len(ranks) > 1 else ["rng_state"]
    return [name for name in wanted if name not in states]


def _is_damaged(file: Path) -> bool:
    """Whether the file cannot be opened. Only the beginning and end of weights are read."""
    try:
        if file.suffix == ".json":
            json.loads(file.read_bytes())
        elif file.suffix == ".safetensors":
            safe_open(file, "pt")  # compares its length with what its header announces
        elif file.suffix in (".pt", ".pth"):
            ZipFile(file).close()  # its table of contents is at its end
    except (ValueError, BadZipFile, SafetensorError):
        return True
    return False
