"""Which prompts a run will ask, before its dataloader brings them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sorl_trl.trainers.cycle.epoch_sampler import EpochRepeatSampler


def cycle_steps(trainer: Any) -> int:
    """Micro-batches that are trained on between two rollouts."""
    return int(trainer.args.steps_per_generation) * int(trainer.num_iterations)


def upcoming_batches(trainer: Any, first: int) -> Iterator[list[dict[str, Any]]]:
    """This process's rows of the data set, batch after batch and epoch after epoch, from batch `first` on.

    A batch is what is sampled together. The order is that of the trainer's own sampler.
    """
    sampler = EpochRepeatSampler.like(trainer._train_sampler)
    sampler.repeat_count = 1
    size = int(trainer.args.generation_batch_size)
    rows = size // trainer.accelerator.num_processes
    mine = rows * trainer.accelerator.process_index
    number, epoch = 0, 0
    while True:
        sampler.set_epoch(epoch)
        indices = list(sampler)
        for start in range(0, len(indices), size):
            if number >= first:
                yield [dict(trainer.train_dataset[i]) for i in indices[start + mine : start + mine + rows]]
            number += 1
        epoch += 1
