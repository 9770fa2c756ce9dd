"""A resumed run continues exactly: inside a generation cycle, and in any epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import send_to_device
from datasets import IterableDataset
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.utils import RepeatSampler

from sorl_trl.command_line import UserMistake
from sorl_trl.files import write_whole
from sorl_trl.trainers.cycle.shared_storage import check_resumable, check_storage, ranks_where
from sorl_trl.trainers.cycle.stale_rollouts import StaleRollouts

logger = get_logger(__name__)

_CYCLE_FIELDS = (
    "world_size",
    "per_device_train_batch_size",
    "steps_per_generation",
    "num_iterations",
    "gradient_accumulation_steps",
)
"""Fields of the configuration that say what a step of a generation cycle is."""


class EpochRepeatSampler(RepeatSampler):
    """`RepeatSampler` that knows its epoch: epoch e has the order of the e-th pass of an uninterrupted run.

    TRL's draws a new order in every pass, so that a resumed run, whose passes are counted anew, repeats the first.
    """

    epoch = 0

    @classmethod
    def like(cls, sampler: RepeatSampler) -> EpochRepeatSampler:
        """One with the settings of `sampler`."""
        return cls(
            data_source=sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()


class ExactResume(StaleRollouts):
    """`GRPOTrainer` whose checkpoints hold what it needs to go on inside a generation cycle.

    TRL saves neither the step within the cycle nor the trajectories that the rest of the cycle is to train on: a
    resumed run would generate others at once.

    Not exact, and warned of on resuming: an iterable dataset after its first pass, since transformers cannot tell how
    long a pass is; and a reference that `sync_ref_model` has moved, which would make each checkpoint as large again.
    What is summed up between two log entries is lost, as it is with transformers' own trainer.
    """

    _train_sampler: EpochRepeatSampler | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        check_storage(self.args)
        check_resumable(self.args, resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _get_train_sampler(self, dataset: Any = None) -> EpochRepeatSampler:
        self._train_sampler = EpochRepeatSampler.like(super()._get_train_sampler(dataset))
        return self._train_sampler

    def _run_epoch(self, **kwargs: Any) -> Any:
        # transformers and accelerate set the epoch of the samplers they find, which, in a resumed run of several
        # processes, lies deeper than they look.
        if self._train_sampler is not None:
            self._train_sampler.set_epoch(kwargs["epoch"])
        return super()._run_epoch(**kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not self.args.save_only_model:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self._save_cycle(Path(self._get_output_dir(trial=trial)) / name)
        # transformers writes the trainer's state last: where that is, all of the checkpoint is.
        super()._save_checkpoint(model, trial)

    def _save_cycle(self, folder: Path) -> None:
        is_unfinished = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        cycle = {
            "step": self._step,
            "buffered_inputs": self._buffered_inputs if is_unfinished else None,
            "waiting_rollouts": list(self._waiting_rollouts),
            "rollout_staleness": self.rollout_staleness,
            **{name: getattr(self.args, name) for name in _CYCLE_FIELDS},
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / self._cycle_file(), lambda file: torch.save(cycle, file))

    def _cycle_file(self) -> str:
        return f"generation_cycle_{self.args.process_index}.pt"

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._warn_of_what_differs()
            self._load_cycle(Path(checkpoint))

    def _warn_of_what_differs(self) -> None:
        # Of an iterable dataset, transformers counts a pass as whole only where a next one was begun.
        if isinstance(self.train_dataset, IterableDataset) and self.state.epoch >= 1:
            logger.warning(
                "The run was interrupted after the first pass over an iterable `train_dataset`, whose length is not "
                "known: it goes on with the first prompts of a pass. Use a dataset with a length to resume exactly."
            )
        if self.args.sync_ref_model:
            logger.warning(
                "`sync_ref_model` moves the reference, which is in no checkpoint: the run goes on with the reference "
                "that a new run starts from."
            )

    def _load_cycle(self, folder: Path) -> None:
        """Restore the step within the generation cycle and the trajectories that are still to be trained on.

        Raises:
            ValueError: trajectories are still to be trained on, and it was written by another number of processes or
                with other batch settings; or it was written with another `rollout_staleness`.
        """
        path = folder / self._cycle_file()
        if without := ranks_where(not path.is_file()):  # all ranks must collect in the same steps
            logger.warning(
                f"{folder} does not say to processes {without} where in a generation cycle it was written "
                "(`trl.GRPOTrainer` wrote it, or it was copied in part): the run goes on with new trajectories."
            )
            return
        # Not straight to the device: accelerate puts several CPU processes on "cpu:0", which torch.load refuses.
        cycle = torch.load(path, map_location="cpu", weights_only=True)
        if cycle["rollout_staleness"] != self.rollout_staleness:
            raise UserMistake(
                f"`rollout_staleness` is {self.rollout_staleness}, but was {cycle['rollout_staleness']} when {folder} "
                "was written, and its rollouts are still to be trained on. Resume with the same, or start a new run."
            )
        if cycle["buffered_inputs"] is None and not cycle["waiting_rollouts"]:
            self._step = 0  # the next step begins a cycle, which may be another one
            return
        for name in _CYCLE_FIELDS:
            if cycle[name] != getattr(self.args, name):
                raise UserMistake(
                    f"`{name}` is {getattr(self.args, name)}, but was {cycle[name]} when {folder} was written, with "
                    "trajectories still to be trained on. Resume with the same or, without `rollout_staleness`, from "
                    "the end of a generation cycle; or start a new run."
                )
        self._step = cycle["step"]
        self._buffered_inputs = send_to_device(cycle["buffered_inputs"], self.accelerator.device)
        self._waiting_rollouts = deque(send_to_device(cycle["waiting_rollouts"], self.accelerator.device))
