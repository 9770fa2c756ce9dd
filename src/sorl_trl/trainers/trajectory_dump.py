"""Writes the trajectories of some updates, with each token's part in the loss, for `sorl view`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback

from sorl_trl.methods import MicroBatch, Objective
from sorl_trl.ops import is_outside
from sorl_trl.records import trained
from sorl_trl.rollout.trajectories import decode, token_texts
from sorl_trl.trainers.batch import GENERATED_AT
from sorl_trl.trainers.config import TurnLevelConfig
from sorl_trl.trainers.rollout import Rollout
from sorl_trl.types import Trajectory

_ASKED = "asked"
"""Key of a batch: a list of what `_asked` returns, which TRL shuffles and splits as it does tensors."""


class TrajectoryDump(TrainerCallback):
    """Writes what one process trains on in every `save_trajectories_steps`-th optimizer step, when the step ends."""

    def __init__(self, args: TurnLevelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.args, self.tokenizer = args, tokenizer
        self._rows: list[trained.TrainedTrajectory] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Discard what an earlier run has kept in memory, or written about steps that this run will make."""
        self._rows = []
        if self.args.save_trajectories_steps and state.is_local_process_zero:
            trained.discard_later(self.args.output_dir, state.global_step)

    def prepare(self, rollout: Rollout) -> None:
        """Add to a rollout's batch what its tensors lack about the trajectories."""
        if self.args.save_trajectories_steps:
            totals = rollout.own(rollout.scored.totals()).tolist()
            columns = zip(rollout.rows, rollout.sampled, totals, strict=True)
            rollout.batch[_ASKED] = [_asked(row, len(own.completion_ids), reward) for row, own, reward in columns]

    @torch.no_grad()
    def observe(self, batch: MicroBatch, objective: Objective) -> None:
        """Keep a micro-batch if its step is to be written, and write the step when it ends."""
        every = self.args.save_trajectories_steps
        # A batch from before a checkpoint may lack what `prepare` adds.
        if every and batch.step % every == 0 and batch.age is not None and _ASKED in batch.inputs:
            self._rows.extend(self._trained(batch, objective))
        if batch.is_training and batch.ends_step:
            if self._rows:
                trained.write_trained(self.args.output_dir, batch.step, self.args.process_index, self._rows)
            self._rows = []

    def _trained(self, batch: MicroBatch, objective: Objective) -> Iterator[trained.TrainedTrajectory]:
        inputs, log_ratio = batch.inputs, batch.log_ratio
        columns = {
            "turn_ids": batch.turns.turn_ids.tolist(),
            "token_ratios": log_ratio.float().exp().tolist(),
            "ratios": batch.ratio.float().tolist(),
            "advantages": batch.advantages.expand_as(log_ratio).float().tolist(),
            "clipped": _clip_states(batch, objective),
        }
        if "context_ids" in inputs:
            columns["context_ids"] = inputs["context_ids"].tolist()
        for i, asked in enumerate(inputs[_ASKED]):
            length = asked["tokens"]
            prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
            completion = inputs["completion_ids"][i][:length].tolist()
            per_token: dict[str, Any] = {name: tuple(rows[i][:length]) for name, rows in columns.items()}
            yield trained.TrainedTrajectory(
                step=batch.step,
                generated_at_step=int(inputs[GENERATED_AT]),
                prompt=decode(self.tokenizer, prompt),
                tokens=tuple(token_texts(self.tokenizer, completion)),
                **per_token,
                **{name: value for name, value in asked.items() if name != "tokens"},
            )


def _clip_states(batch: MicroBatch, objective: Objective) -> list[list[str]]:
    """For each token INSIDE, OUTSIDE, CLIPPED (outside the range, without a gradient) or UNTRAINED."""
    states = torch.zeros_like(batch.turns.turn_ids)
    states[is_outside(batch.ratio, *batch.clip_range[:2]) | batch.ratio.isnan()] = 1
    states[objective.stopped] = 2
    states[~batch.loss_mask] = 3
    names = (trained.INSIDE, trained.OUTSIDE, trained.CLIPPED, trained.UNTRAINED)
    return [[names[state] for state in row] for row in states.tolist()]


def _asked(example: Mapping[str, Any], length: int, reward: float) -> dict[str, Any]:
    """What the tensors of a batch do not say about a trajectory, in types that a checkpoint can store.

    The columns of a training set may have any type, and a column of one of these names may mean something else.
    """
    question, golden = example.get("question"), example.get("golden_answers")
    answers = golden if isinstance(golden, Sequence) and not isinstance(golden, str) else [golden]
    found = example.get("trajectory")
    trajectory = found if isinstance(found, Trajectory) else None
    turns = trajectory.turns if trajectory else ()
    return {
        "tokens": length,
        "question": question if isinstance(question, str) else None,
        "golden_answers": [str(answer) for answer in answers if answer is not None],
        "reward": None if math.isnan(reward) else reward,
        "answer": trajectory and trajectory.answer,
        "stop_reason": trajectory and trajectory.stop_reason.value,
        "actions": [turn.action.tool or turn.action.kind.value for turn in turns],
        "turn_rewards": [turn.reward for turn in turns],
        "roles": [seen.role for seen in trajectory.observations] if trajectory else [],
    }
