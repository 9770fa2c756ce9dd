"""What the options of credit must be together with the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sorl_trl.checks import Problem
from sorl_trl.trainers.config_rules import SUM_THEN_NORMALIZE

if TYPE_CHECKING:
    from sorl_trl.trainers.base_config import TurnLevelConfig
    from sorl_trl.trainers.so_ppo_config import SOPPOConfig


def credit_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    """What no turn-level trainer can do with these options."""
    if config.information_gain_coef == 0:
        yield from _unread_gain_problems(config)
    elif config.remove_unused_columns:
        yield Problem(
            "remove_unused_columns",
            f"`remove_unused_columns` is True, but `information_gain_coef={config.information_gain_coef}` reads the "
            f"column {config.information_gain_column!r}, which would be removed. Leave it False.",
            False,
        )


def _unread_gain_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    for name, unset in (("information_gain_column", "golden_answers"), ("information_gain_prefix", None)):
        if (value := getattr(config, name)) != unset:
            yield Problem(
                name,
                f"`{name}` is {value!r}, but nothing reads it: `information_gain_coef` is 0. Set "
                f"`information_gain_coef`, or leave `{name}` unset.",
                unset,
            )


def group_credit_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    """What SO-GRPO cannot do."""
    if config.turn_reward_normalization == "separate" and config.group_baseline != "mean":
        yield Problem(
            "group_baseline",
            f"`group_baseline` is {config.group_baseline!r}, but `turn_reward_normalization='separate'` compares each "
            "kind of reward with its mean in the group. Set it to 'mean'.",
            "mean",
        )
    if config.multi_objective_aggregation == SUM_THEN_NORMALIZE:
        return
    for name, off in _OFF.items():
        if (value := getattr(config, name)) != off:
            yield Problem(
                "multi_objective_aggregation",
                f"`multi_objective_aggregation` is {config.multi_objective_aggregation!r}, but `{name}={value!r}` "
                f"needs {SUM_THEN_NORMALIZE!r}.",
                SUM_THEN_NORMALIZE,
            )
            return


def critic_credit_problems(config: SOPPOConfig) -> Iterator[Problem]:
    """What SO-PPO cannot do."""
    for name in ("turn_reward_normalization", "step_advantage_coef"):
        if (value := getattr(config, name)) != _OFF[name]:
            yield Problem(
                name,
                f"`{name}` is {value!r}, but that compares the turns of a group, and SO-PPO's advantages come from a "
                f"critic. Set `{name}={_OFF[name]!r}`, or use SO-GRPO.",
                _OFF[name],
            )


_OFF: dict[str, Any] = {
    "turn_reward_normalization": "together",
    "information_gain_coef": 0.0,
    "step_advantage_coef": 0.0,
}
"""Each switch, and its value where it is off."""
