"""Baselines of groups, and which groups and trajectories are trained on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from sorl_trl.checks import COUNT, SHARE, SWITCH, OneOf
from sorl_trl.ops import GROUP_BASELINES, GROUP_FILTERS


@dataclass
class GroupOptions:
    """Baselines of groups, and which groups and trajectories are trained on."""

    group_baseline: Annotated[str, OneOf(GROUP_BASELINES)] = field(
        default="mean",
        metadata={
            "help": "What a trajectory's return is compared with. 'mean' (default): the mean of its group. "
            "'leave_one_out': the mean of the group's other trajectories (LOOP); for `scale_rewards='none'` alone."
        },
    )
    group_filter: Annotated[str, OneOf(GROUP_FILTERS)] = field(
        default="none",
        metadata={
            "help": "Which groups are trained on; the others leave the loss and what it divides by. 'none' (default): "
            "all. 'zero_variance': those whose rewards differ (DAPO). 'top_k': of these, `group_filter_share` of all "
            "groups, those that differ most (StarPO-S). 'top_p': the fewest that hold `group_filter_share` of the "
            "sum of all variances. The guard, metrics of rewards and evaluations go on seeing all groups."
        },
    )
    group_filter_share: Annotated[float, SHARE] = field(
        default=1.0,
        metadata={
            "help": "For `group_filter='top_k'` the share of the groups, rounded up, and for 'top_p' the share of the "
            "variance that is kept; at least one group whose rewards differ is."
        },
    )
    group_filter_reward: str | None = field(
        default=None,
        metadata={
            "help": "Name of the reward function whose values decide `group_filter`. Default: the weighted sum of "
            "all. Where a reward is shaped, name the accuracy: what shaping alone tells apart is not worth a group."
        },
    )
    group_refill: Annotated[int, COUNT] = field(
        default=0,
        metadata={
            "help": "How many times, at most, groups whose rewards are all equal are asked again with other prompts "
            "(DAPO, with a bound). Each round generates a whole batch of other prompts of `train_dataset`, whose "
            "groups take the places of those without a spread; what is left then, `group_filter` drops. For "
            "`SOGRPOTrainer`, in training. 0 (default): never."
        },
    )
    mask_void_trajectories: Annotated[bool, SWITCH] = field(
        default=False,
        metadata={
            "help": "Leave a trajectory with a void turn, one that neither acts nor answers, out of the loss and of "
            "what it divides by (SimpleTIR). Its reward stays in its group's baseline. It wins over a penalty for "
            "invalid actions (`format`, `turn_format`): the trajectory that is penalized is not trained on. For "
            "a `rollout_func` that gives trajectories, such as `SearchRollout`."
        },
    )
