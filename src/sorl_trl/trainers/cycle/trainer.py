"""The generation cycle in a trainer: its rollouts, its order of prompts, and the checkpoints that keep both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from sorl_trl.trainers.cycle.epoch_sampler import EpochRepeatSampler
from sorl_trl.trainers.cycle.generation_cycle import GenerationCycle
from sorl_trl.trainers.cycle.roll_back import roll_back
from sorl_trl.trainers.cycle.shared_storage import check_resumable, check_storage


class CycleTrainer(GRPOTrainer):
    """`GRPOTrainer` whose rollouts may wait for later ones, and whose runs can be resumed within a generation cycle.

    Args:
        rollout_staleness: how many rollouts late each is trained on.
        given: the arguments of `GRPOTrainer`.
    """

    _train_sampler: EpochRepeatSampler | None = None

    def __init__(self, rollout_staleness: int, **given: Any) -> None:
        self._cycle = GenerationCycle(self, rollout_staleness)
        super().__init__(**given)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return self._cycle.prepare_inputs(generation_batch, super()._prepare_inputs)

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
            self._cycle.save(Path(self._get_output_dir(trial=trial)) / name)
        # transformers writes the trainer's state last: where that is, all of the checkpoint is.
        super()._save_checkpoint(model, trial)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            self._cycle.load(Path(resume_from_checkpoint))
        return prepared

    def roll_back(self, checkpoint: str | Path) -> None:
        """Restore what a resumed run would: policy, critic, optimizer, schedule and gradient scaler.

        The step, the epoch, the order of prompts and the random numbers go on as they are, and the next step collects
        new trajectories. Between two optimizer steps, on all ranks together.

        Raises:
            ValueError: `checkpoint` is not a whole checkpoint, or, with `save_only_model`, has no optimizer.
        """
        roll_back(self, self._cycle, checkpoint)
