"""Trains on one turn of every trajectory at a time, the last one first: SeeUPO's way through a rollout.

The rollout is buffered as TRL buffers it. What changes from turn to turn stands in the buffered micro-batches, beside
the rows that it belongs to, so that it is shuffled, split and saved in checkpoints with them: `MULTIPLIER` of each
trajectory, the log-probabilities that its turn started from, and `TURN`, which turn they were made ready for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing

from sorl_trl.experimental.seeupo_ops import next_multiplier
from sorl_trl.ops import bounded_log_ratio
from sorl_trl.trainers.loss.micro_batch import IMAGE_INPUTS, ROW_SCALE, TURN, MicroBatch

MULTIPLIER = "turn_multiplier"
"""Field of a batch: (B,) M of each trajectory, the product of the ratios of its turns that were updated."""


class BackwardTurns:
    """Which turn a trainer is at, what is to be done before it, and the micro-batch that has this turn alone.

    TRL goes `num_iterations` times over the micro-batches of a rollout; in iteration i turn `num_iterations` − 1 − i
    is trained. All ranks are at the same turn, and make as many forward passes.

    Args:
        trainer: a `GRPOTrainer`.
    """

    is_absent = False
    """Whether no trajectory of any rank has the turn that was asked for last."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def begin(self, output: dict[str, Any]) -> None:
        """Put into the batch that was made of a rollout, (B, …), what goes with it from turn to turn."""
        rows = output["completion_ids"]
        output[MULTIPLIER] = torch.ones(len(rows), device=rows.device)
        output[TURN] = torch.tensor(self._trainer.num_iterations)  # above all turns: none has been trained

    def micro_batch(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """That of the turn which is due, of a buffered micro-batch. All ranks call it together."""
        trainer = self._trainer
        turn = trainer.num_iterations - 1 - trainer._step // trainer.args.steps_per_generation % trainer.num_iterations
        if int(inputs[TURN]) != turn:
            self._go_on_to(turn)
        self.is_absent = float(inputs[ROW_SCALE]) == 0.0
        return turn_alone(inputs, turn)

    def _go_on_to(self, turn: int) -> None:
        """Make every buffered micro-batch ready for `turn`.

        After a roll back the trajectories may be new and the turn one in the middle: those behind it are not trained.
        """
        trainer = self._trainer
        buffered = trainer._buffered_inputs
        kept = [each["turn_ids"] == turn for each in buffered]
        local = torch.stack([torch.stack([of_turn.any(1).sum(), of_turn.sum()]) for of_turn in kept]).sum(0)
        rows, tokens = trainer.accelerator.gather(local.unsqueeze(0)).sum(0)
        of_all = sum(map(len, kept)) * trainer.accelerator.num_processes
        scale = torch.tensor(of_all / int(rows) if rows else 0.0, dtype=torch.float64)
        for each in buffered:
            if int(each[TURN]) < trainer.num_iterations:
                self._close_turn(each)
            each[TURN], each[ROW_SCALE] = torch.tensor(turn), scale
            each["num_items_in_batch"] = tokens
            each["generated_at_step"] = torch.tensor(trainer.state.global_step)

    def _close_turn(self, inputs: dict[str, Any]) -> None:
        """The turn before has been updated. One pass gives its new log-probabilities, and the old ones of the next."""
        logps = self._logps(inputs)
        log_ratio = bounded_log_ratio(logps - inputs["old_per_token_logps"])
        of_turn = inputs["turn_ids"] == int(inputs[TURN])
        inputs[MULTIPLIER] = next_multiplier(inputs[MULTIPLIER], log_ratio, of_turn)
        inputs["old_per_token_logps"] = logps

    def _logps(self, inputs: dict[str, Any]) -> Tensor:
        """(B, T) under the policy as it is, from the pass that the loss will make."""
        trainer, checkpointing = self._trainer, self._trainer.args.gradient_checkpointing_kwargs
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        images = {name: inputs[name] for name in IMAGE_INPUTS if name in inputs}
        length = inputs["completion_ids"].size(1)
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(trainer.model, checkpointing),
        ):
            logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length, **images)
        return logps

    def observe(self, batch: MicroBatch) -> None:
        """Say where training is, and what the multipliers are, before `MetricLog` observes the micro-batch."""
        if not batch.is_training:
            return
        if self.is_absent:  # TRL has logged the mean over no token, which is no entropy of 0
            self._trainer._metrics["train"]["entropy"].pop()
        log, has_turn, multiplier = self._trainer._metric_log, batch.turns.counts > 0, batch.inputs[MULTIPLIER]
        everywhere = torch.ones_like(has_turn)
        log.add_mean("seeupo/turn", torch.full_like(multiplier, int(batch.inputs[TURN])), everywhere)
        log.add_mean("seeupo/trajectories_with_turn", has_turn.float(), everywhere)
        log.add_mean("seeupo/multiplier_mean", multiplier, has_turn)
        log.add_extremes("seeupo/multiplier", multiplier, has_turn)


def turn_alone(inputs: dict[str, Any], turn: int) -> dict[str, Any]:
    """A copy of a micro-batch whose trajectories have this turn, with its advantage times the multiplier, or none.

    The policy reads the trajectories as they are: nothing but the mask of the loss is another.

    Args:
        inputs: of B trajectories, with `turn_ids` (B, T), advantages (B, T) and `MULTIPLIER` (B,).
        turn: from 0.
    """
    of_turn = inputs["turn_ids"] == turn
    loss_mask = inputs.get("tool_mask", torch.ones_like(inputs["completion_mask"]))
    return {
        **inputs,
        "tool_mask": loss_mask * of_turn,
        "turn_ids": torch.where(of_turn, 0, -1),
        "turn_counts": (inputs["turn_counts"] > turn).long(),
        "advantages": inputs["advantages"] * inputs[MULTIPLIER].unsqueeze(1),
    }
