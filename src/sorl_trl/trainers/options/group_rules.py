"""What the options of groups must be together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sorl_trl.checks import Problem
from sorl_trl.trainers.config_rules import SUM_THEN_NORMALIZE, dropping_problems

if TYPE_CHECKING:
    from sorl_trl.trainers.base_config import TurnLevelConfig

_SHARES = ("top_k", "top_p")


def group_option_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    """What no trainer can do with them."""
    if config.group_baseline == "leave_one_out":
        yield from _leave_one_out_problems(config)
    yield from _filter_problems(config)
    if config.group_refill:
        yield from _refill_problems(config)
    if config.mask_void_trajectories:
        yield from dropping_problems(config, "mask_void_trajectories")


def critic_group_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    """What a trainer whose baseline is a critic cannot do with them."""
    if config.group_baseline != "mean":
        yield Problem(
            "group_baseline",
            f"`group_baseline` is {config.group_baseline!r}, but the advantages of SO-PPO come from the critic: no "
            "baseline is taken of a group. Set it to 'mean', the default, or use SO-GRPO.",
            "mean",
        )
    if config.group_refill:
        yield Problem(
            "group_refill",
            f"`group_refill` is {config.group_refill}, but a critic learns from groups without a spread too, and its "
            "values are those of one pass over one batch. Set it to 0, or use SO-GRPO.",
            0,
        )


def _leave_one_out_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    if config.scale_rewards not in ("none", False):
        yield Problem(
            "scale_rewards",
            f"`scale_rewards` is {config.scale_rewards!r}, but `group_baseline='leave_one_out'` divides by no "
            "standard deviation: an advantage that is G / (G - 1) times as large would be scaled a second time, and "
            "in groups that nearly agree it would be a spike. Set `scale_rewards='none'`.",
            "none",
        )
    if config.multi_objective_aggregation != SUM_THEN_NORMALIZE:
        yield Problem(
            "multi_objective_aggregation",
            f"`multi_objective_aggregation` is {config.multi_objective_aggregation!r}, but "
            "`group_baseline='leave_one_out'` compares the weighted sum of the rewards: use 'sum_then_normalize'.",
            SUM_THEN_NORMALIZE,
        )


def _filter_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    if config.group_filter == "none":
        if config.group_filter_reward is not None:
            yield Problem(
                "group_filter_reward",
                f"`group_filter_reward` is {config.group_filter_reward!r}, but nothing reads it: `group_filter` is "
                "'none'. Set `group_filter`, or leave it unset.",
            )
    else:
        yield from dropping_problems(config, "group_filter")
        if config.num_generations == 1:
            yield Problem(
                "num_generations",
                f"`num_generations` is 1, but `group_filter={config.group_filter!r}` asks how the rewards of a group "
                "differ. Set `num_generations` to 2 or more.",
            )
    if config.group_filter not in _SHARES and config.group_filter_share != 1.0:
        yield Problem(
            "group_filter_share",
            f"`group_filter_share` is {config.group_filter_share}, but nothing reads it: `group_filter` is "
            f"{config.group_filter!r}. Set `group_filter` to 'top_k' or 'top_p', or leave it unset.",
            1.0,
        )


def _refill_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    of_option = f"`group_refill` is {config.group_refill}, but "
    if config.group_filter == "none":
        yield Problem(
            "group_filter",
            f"{of_option}`group_filter` is 'none', and what no round could fill would be trained on. Set "
            "`group_filter='zero_variance'`.",
            "zero_variance",
        )
    if config.scale_rewards == "batch" or config.multi_objective_aggregation != SUM_THEN_NORMALIZE:
        name = "scale_rewards" if config.scale_rewards == "batch" else "multi_objective_aggregation"
        yield Problem(
            name,
            f"{of_option}`{name}` is {getattr(config, name)!r}: advantages that are scaled by a batch cannot be put "
            "together from several. Use a scaling by group, or none.",
            "group" if name == "scale_rewards" else SUM_THEN_NORMALIZE,
        )
    if config.remove_unused_columns:
        yield Problem(
            "remove_unused_columns",
            f"{of_option}`remove_unused_columns` is True: reward functions would see columns in one round that they "
            "miss in the other. Set it to False, TRL's default.",
            False,
        )
