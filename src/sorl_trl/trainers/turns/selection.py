"""Which trajectories of a rollout are trained on: `group_filter` and `mask_void_trajectories`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sorl_trl.checks import Problem, raise_first
from sorl_trl.ops import group_spread, kept_groups
from sorl_trl.trainers.turns.dropping import drop
from sorl_trl.types import ActionKind, Trajectory


def check_selection(args: Any, reward_names: Sequence[str], has_rollout: bool) -> None:
    """Raise ValueError for options of which this trainer's rewards or rollout know nothing.

    Args:
        args: of the trainer.
        reward_names: of its reward functions.
        has_rollout: whether it has a `rollout_func`.
    """
    raise_first(reward_name_problems(args, reward_names))
    if args.mask_void_trajectories and not has_rollout:
        raise ValueError(
            "`mask_void_trajectories` is True, but has no effect without a `rollout_func`: in TRL's tool loop a turn "
            "that calls no tool is the last, so that no turn is void. Set it to False."
        )


def reward_name_problems(args: Any, reward_names: Sequence[str]) -> Iterator[Problem]:
    """Whether there is a reward function, by these names, for `group_filter_reward` of the trainer's `args`."""
    name = args.group_filter_reward
    if name is not None and name not in reward_names:
        yield Problem(
            "group_filter_reward",
            f"`group_filter_reward` is {name!r}, but must be the name of a reward function: one of "
            f"{', '.join(map(repr, reward_names))}.",
            reward_names[0],
        )


def select(
    trainer: Any, output: dict[str, Any], rewards_per_func: Tensor, examples: Sequence[Mapping[str, Any]]
) -> None:
    """Drop the trajectories that are not to be trained on, and log what was done. All ranks call it together.

    In training alone: an evaluation counts every trajectory.

    Args:
        trainer: a `GRPOTrainer` with our configuration.
        output: its batch of B trajectories of this rank, not yet split.
        rewards_per_func: (B, F) as `ScoredRollout` has them.
        examples: B rows of the dataset, with what the rollout has added.
    """
    args = trainer.args
    if not trainer.model.training or (args.group_filter == "none" and not args.mask_void_trajectories):
        return
    keep = torch.ones(len(rewards_per_func), dtype=torch.bool, device=rewards_per_func.device)
    if args.group_filter != "none":
        keep &= _in_kept_groups(trainer, rewards_per_func)
    if args.mask_void_trajectories:
        void = torch.tensor(list(map(_is_void, examples)), device=keep.device)
        share = trainer.accelerator.gather(void).float().mean().item()
        trainer._metrics["train"]["trajectories_void"].append(share)
        keep &= ~void
    drop(output, keep, trainer.accelerator)


def deciding_rewards(trainer: Any, rewards_per_func: Tensor) -> Tensor:
    """(all ranks' B,) what `group_filter` looks at, from this rank's (B, F); NaN where a trajectory has none."""
    gathered: Tensor = trainer.accelerator.gather(rewards_per_func)
    name = trainer.args.group_filter_reward
    if name is not None:
        return gathered[:, trainer.reward_func_names.index(name)]
    weighted = (gathered * trainer.reward_weights.to(gathered.device)).nansum(1)
    return torch.where(gathered.isnan().all(1), torch.nan, weighted)


def _in_kept_groups(trainer: Any, rewards_per_func: Tensor) -> Tensor:
    """(B,) bool of this rank."""
    rewards, size = deciding_rewards(trainer, rewards_per_func), trainer.num_generations
    spread = group_spread(rewards, size)
    kept = kept_groups(spread, trainer.args.group_filter, trainer.args.group_filter_share)
    metrics = trainer._metrics["train"]
    metrics["groups/kept"].append(kept.float().mean().item())
    metrics["groups/kept_std"].append(spread[kept].mean().item() if kept.any() else math.nan)
    rows = kept.repeat_interleave(size)
    metrics["groups/kept_reward"].append(rewards[rows].nanmean().item())
    first = trainer.accelerator.process_index * len(rewards_per_func)
    return rows[first : first + len(rewards_per_func)]


def _is_void(example: Mapping[str, Any]) -> bool:
    """Whether a turn of its trajectory neither acts nor answers: no action parses, or a limit has cut it off."""
    trajectory = example.get("trajectory")
    if not isinstance(trajectory, Trajectory):
        raise ValueError(
            "`mask_void_trajectories` is True, but the `rollout_func` does not say what its turns did: it must return "
            "`trajectory`, a `sorl_trl.types.Trajectory` per row, as `SearchRollout` does."
        )
    return any(turn.action.kind is ActionKind.INVALID for turn in trajectory.turns)
