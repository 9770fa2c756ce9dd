"""The order of prompts: the same after a resume as without an interruption, and known before the dataloader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from trl.trainer.utils import RepeatSampler


class EpochRepeatSampler(RepeatSampler):
    """`RepeatSampler` in which epoch e has the order of the e-th pass of an uninterrupted run.

    TRL's sampler draws a new order in every pass, and a resumed run, which counts its passes anew, repeats the first.
    """

    epoch = 0
    """The caller sets it before each pass."""

    @classmethod
    def like(cls, sampler: RepeatSampler) -> EpochRepeatSampler:
        """A sampler with the settings of `sampler`."""
        return cls(
            data_source=sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()


def cycle_steps(trainer: Any) -> int:
    """How many micro-batches are trained on between two rollouts."""
    return int(trainer.args.steps_per_generation) * int(trainer.num_iterations)


def upcoming_batches(trainer: Any, first: int) -> Iterator[list[dict[str, Any]]]:
    """This process's rows of the dataset, batch after batch and epoch after epoch, from batch `first` on.

    A batch is one rollout's rows. The order is that of the trainer's own sampler.
    """
    sampler = EpochRepeatSampler.like(trainer._train_sampler)
    sampler.repeat_count = 1
    size = int(trainer.args.generation_batch_size)
    rows = size // trainer.accelerator.num_processes
    mine = rows * trainer.accelerator.process_index
    number = 0
    while True:
        indices = list(sampler)
        for start in range(0, len(indices), size):
            if number >= first:
                yield [dict(trainer.train_dataset[i]) for i in indices[start + mine : start + mine + rows]]
            number += 1
        sampler.epoch += 1
