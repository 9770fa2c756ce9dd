"""How the turns of a trajectory share in what it earned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from sorl_trl.checks import NOT_NEGATIVE, OneOf

TURN_REWARD_NORMALIZATIONS = ("together", "separate")


@dataclass
class CreditOptions:
    """How the turns of a trajectory share in what it earned."""

    turn_reward_normalization: Annotated[str, OneOf(TURN_REWARD_NORMALIZATIONS)] = field(
        default="together",
        metadata={
            "help": "How turn rewards and outcomes are compared within a group, for SO-GRPO. 'together' (default): "
            "they are added and discounted, and the returns of turns are normalized. 'separate': each kind is "
            "normalized by itself, over all entries that the group has of it, and discounted then, as in IGPO (arXiv "
            "2510.14967)."
        },
    )
    information_gain_coef: Annotated[float, NOT_NEGATIVE] = field(
        default=0.0,
        metadata={
            "help": "Weight of a turn's information gain, a turn reward beside those of the reward functions: by how "
            "much the turn and the observation after it raise the policy's mean log-probability of the golden "
            "answer's tokens. The last turn has none. `turn_reward_normalization='separate'` divides the weight out "
            "again, unless a reward function gives turn rewards too, or `scale_rewards` is 'none'. 1 in IGPO (arXiv "
            "2510.14967); 0 (default): off."
        },
    )
    information_gain_column: str = field(
        default="golden_answers",
        metadata={
            "help": "The column of the data set with the answer that information gain scores: a string, or a list of "
            "strings, of which the first is taken."
        },
    )
    information_gain_prefix: str | None = field(
        default=None,
        metadata={
            "help": "What the policy would write right before an answer; information gain scores the answer's tokens "
            "after it. Unset, it is the `<answer>` tag where the rollout has a tag protocol (`SearchRollout`), and "
            "nothing else."
        },
    )
    step_advantage_coef: Annotated[float, NOT_NEGATIVE] = field(
        default=0.0,
        metadata={
            "help": "Weight of the step-level advantage of GiGPO (arXiv 2505.10978), added to the group's, for "
            "SO-GRPO: the discounted return from a turn, compared with those of the group's turns that start after "
            "the same observation (the first turns: after the same prompt). 1 in GiGPO; 0 (default): off."
        },
    )
