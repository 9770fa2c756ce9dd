"""Rollouts that are trained on late, as an asynchronous trainer trains on them, without asynchrony."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor
from trl import GRPOTrainer


class LateRollouts:
    """Has a trainer train on each rollout after it has collected `staleness` later ones.

    Old log-probabilities are those of the policy that sampled. The lag grows to `staleness` at the start, while each
    batch of prompts is asked twice. Nothing of it is in a checkpoint.

    Args:
        trainer: a `GRPOTrainer`, whose `_prepare_inputs` this replaces.
        staleness: how many rollouts late each is trained on.
    """

    def __init__(self, trainer: GRPOTrainer, staleness: int) -> None:
        self.waiting: deque[list[dict[str, Tensor]]] = deque()
        """Rollouts that later ones must be collected before, each split into micro-batches, the oldest first."""
        self._trainer, self._staleness, self._prepare = trainer, staleness, trainer._prepare_inputs
        trainer._prepare_inputs = self

    def __call__(self, generation_batch: Any) -> Any:
        """The next micro-batch to train on."""
        trainer = self._trainer
        steps = trainer.args.steps_per_generation * trainer.num_iterations
        if not trainer.model.training or (trainer._step % steps and trainer._buffered_inputs):
            return self._prepare(generation_batch)
        for _ in range(1 if len(self.waiting) == self._staleness else 2):
            trainer._buffered_inputs = None
            self._prepare(generation_batch)
            for batch in trainer._buffered_inputs:
                if "old_per_token_logps" not in batch:  # TRL needs none where a rollout makes one update
                    batch["old_per_token_logps"] = trainer._score(trainer.model, batch).logps
            self.waiting.append(trainer._buffered_inputs)
        trainer._buffered_inputs = self.waiting.popleft()
        return trainer._buffered_inputs[trainer._step % trainer.args.steps_per_generation]
