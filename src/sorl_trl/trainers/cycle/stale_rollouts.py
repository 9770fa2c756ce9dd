"""Training on older rollouts, as an asynchronous trainer does: each is used a fixed number of rollouts late."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from trl import GRPOTrainer


class StaleRollouts(GRPOTrainer):
    """`GRPOTrainer` that trains on each rollout only after `rollout_staleness` later ones have been collected.

    With 0 it is `GRPOTrainer`. With n, every trajectory is sampled, and its old log-probabilities are taken, n
    rollouts before the policy's first update on it. The lag grows to n at the start, while each batch of prompts is
    asked twice.
    """

    rollout_staleness: int = 0
    num_iterations: int
    _buffered_inputs: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._waiting_rollouts: deque[list[dict[str, Tensor]]] = deque()
        super().__init__(*args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not (self.rollout_staleness and self.model.training and self._needs_rollout()):
            return super()._prepare_inputs(generation_batch)
        with self._old_policy_scored():
            for _ in range(1 if len(self._waiting_rollouts) == self.rollout_staleness else 2):
                self._buffered_inputs = None
                super()._prepare_inputs(generation_batch)
                self._waiting_rollouts.append(self._buffered_inputs)
        self._buffered_inputs = self._waiting_rollouts.popleft()
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _needs_rollout(self) -> bool:
        """As TRL decides it."""
        return self._step % (self.args.steps_per_generation * self.num_iterations) == 0 or not self._buffered_inputs

    @contextmanager
    def _old_policy_scored(self) -> Iterator[None]:
        """Have TRL take the old log-probabilities even where, without staleness, a rollout makes one update only."""
        num_iterations = self.num_iterations
        self.num_iterations = num_iterations * (1 + self.args.gradient_accumulation_steps)
        try:
            yield
        finally:
            self.num_iterations = num_iterations

    def discard_rollouts(self) -> None:
        """Forget all trajectories that are still to be trained on: the next step collects new ones."""
        self._buffered_inputs = None
        self._waiting_rollouts.clear()
