"""Keeps the trajectories of some updates, with what the loss made of each token, for `sorl_trl.evaluation.view`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from sorl_trl.ops import importance_ratio, is_clipped
from sorl_trl.rollout.tokens import decode, token_texts
from sorl_trl.rollout.trained import (
    CLIPPED,
    INSIDE,
    OUTSIDE,
    UNTRAINED,
    Shard,
    TrainedTrajectory,
    discard_later,
    write_trained,
)
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.config_rules import LOSSES_WITHOUT_MIN
from sorl_trl.types import Trajectory

_ASKED = "asked"
"""Key of a batch: a list, which TRL shuffles and splits as it does tensors, of what `_asked` gives."""


class TrajectoryDump(TrainerCallback):
    """What one process trains on in every n-th optimizer step, written when the step's last micro-batch is there.

    Args:
        args: of the trainer; its `save_trajectories_steps` is n.
        tokenizer: of the policy.
        clip_range: how far a ratio may fall below and rise above 1.
    """

    def __init__(
        self, args: TurnLevelConfig, tokenizer: PreTrainedTokenizerBase, clip_range: tuple[float, float]
    ) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.clip_range = clip_range
        self._rows: list[TrainedTrajectory] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What an earlier run wrote of the steps to come is not this run's."""
        if self.args.save_trajectories_steps:
            discard_later(self.args.output_dir, self._shard(state.global_step))

    def prepare(
        self, batch: dict[str, Any], examples: Sequence[Mapping[str, Any]], rewards: Tensor, weights: Tensor
    ) -> None:
        """Add to a new batch what it does not say about its B trajectories.

        Args:
            batch: as TRL makes it of a rollout.
            examples: their rows of the training set, with what the rollout has added.
            rewards: (B, F) of each reward function, NaN where it gave none.
            weights: (F,).
        """
        if self.args.save_trajectories_steps:
            weights = weights.to(rewards.device)
            batch[_ASKED] = [_asked(example, row, weights) for example, row in zip(examples, rewards, strict=True)]

    @torch.no_grad()
    def add(
        self, step: int, batch: Mapping[str, Any], log_ratio: Tensor, turn_ids: Tensor, advantages: Tensor
    ) -> None:
        """A micro-batch of an optimizer step, from 1: (B, T) log-ratios and turns, (B, T) or (B, 1) advantages."""
        every = self.args.save_trajectories_steps
        if not every or step % every or _ASKED not in batch:  # a batch may be of before a checkpoint
            return
        ratio = importance_ratio(log_ratio, turn_ids, self.args.importance_sampling_level, self.args.turn_ratio)
        columns = {
            "turn_ids": turn_ids,
            "token_ratios": log_ratio.float().exp(),
            "ratios": ratio.float(),
            "advantages": advantages.expand_as(log_ratio).float(),
        }
        states = self._clip_states(ratio, turn_ids, advantages)
        for i, asked in enumerate(batch[_ASKED]):
            length = asked["tokens"]
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()]
            per_token: dict[str, Any] = {name: tuple(values[i, :length].tolist()) for name, values in columns.items()}
            self._rows.append(
                TrainedTrajectory(
                    step=step,
                    generated_at_step=int(batch["generated_at_step"]),
                    prompt=decode(self.tokenizer, prompt.tolist()),
                    tokens=tuple(token_texts(self.tokenizer, batch["completion_ids"][i, :length].tolist())),
                    clipped=states[i][:length],
                    **per_token,
                    **{name: value for name, value in asked.items() if name != "tokens"},
                )
            )

    def write(self) -> None:
        """Keep what was added since the last time, if anything was."""
        if self._rows:
            write_trained(self.args.output_dir, self._shard(self._rows[0].step), self._rows)
        self._rows = []

    def _shard(self, step: int) -> Shard:
        return Shard(step, self.args.process_index, self.args.world_size)

    def _clip_states(self, ratio: Tensor, turn_ids: Tensor, advantages: Tensor) -> Sequence[tuple[str, ...]]:
        low, high = self.clip_range
        states = torch.zeros_like(turn_ids)
        states[~((ratio >= 1 - low) & (ratio <= 1 + high))] = 1  # where it is not a number, too
        if self.args.loss_type not in LOSSES_WITHOUT_MIN:
            states[is_clipped(ratio, advantages, low, high)] = 2
        states[turn_ids < 0] = 3
        names = (INSIDE, OUTSIDE, CLIPPED, UNTRAINED)
        return [tuple(names[state] for state in row) for row in states.tolist()]


def _asked(example: Mapping[str, Any], rewards: Tensor, weights: Tensor) -> dict[str, Any]:
    """What the tensors of a batch do not say about a trajectory, in types that a checkpoint takes.

    The columns of a training set may be of any type, and their names mean something else there.
    """
    question, golden = example.get("question"), example.get("golden_answers") or ()
    found = example.get("trajectory")
    trajectory = found if isinstance(found, Trajectory) else None
    return {
        "tokens": len(example["turn_ids"]),
        "question": question if isinstance(question, str) else None,
        "golden_answers": [golden] if isinstance(golden, str) else [str(answer) for answer in golden],
        "reward": None if rewards.isnan().all() else float((rewards * weights).nansum()),
        "answer": trajectory and trajectory.answer,
        "stop_reason": trajectory and trajectory.stop_reason.value,
    }
