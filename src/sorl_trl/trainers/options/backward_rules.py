"""What a trainer that trains one turn at a time cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sorl_trl.checks import POSITIVE_COUNT, Problem
from sorl_trl.trainers.config_rules import SUM_THEN_NORMALIZE, dropping_problems

if TYPE_CHECKING:
    from sorl_trl.trainers.base_config import TurnLevelConfig

_TOGETHER = "SeeUPO compares each turn with the same turn of all trajectories of the batch, by what they earned"
_ONE = "SeeUPO's loss sees one turn at a time"
_ONLY: dict[str, tuple[Any, str]] = {
    "importance_sampling_level": ("turn", "SeeUPO's ratio is that of the turn which is trained"),
    "rollout_staleness": (0, "SeeUPO takes the old log-probabilities of a turn right before it is trained"),
    "scale_rewards": ("batch", f"{_TOGETHER}, and divides by their spread"),
    "group_baseline": ("mean", _TOGETHER),
    "gamma": (1.0, f"{_TOGETHER} in all, whatever turn earned it"),
    "turn_reward_normalization": ("together", f"{_TOGETHER} in all"),
    "step_advantage_coef": (0.0, _TOGETHER),
    "multi_objective_aggregation": (SUM_THEN_NORMALIZE, f"{_TOGETHER} in all"),
    "group_refill": (0, f"{_TOGETHER}, so that a batch cannot be put together from several"),
    "llds_coef": (0.0, f"{_ONE}, and LLDS counts the tokens of trajectories that are good in all their turns"),
    "save_trajectories_steps": (0, f"{_ONE}, and what is written would show the others as not trained"),
    "turn_boundary": (
        "recorded",
        "`num_iterations` must be the most turns that a trajectory can have, and nothing limits how often the policy "
        "writes a tag",
    ),
}
"""Option -> the only value that it may have, and why."""


def backward_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    """What SeeUPO cannot be beside the other options."""
    for name, (only, why) in _ONLY.items():
        if (value := getattr(config, name)) != only:
            yield Problem(name, f"`{name}` is {value!r}, but must be {only!r}: {why}.", only)
    yield from dropping_problems(config, "trainer: seeupo")
    corrects = config.use_vllm and config.vllm_importance_sampling_correction
    if corrects and config.vllm_importance_sampling_mode == "turn_mask":
        yield Problem(
            "vllm_importance_sampling_mode",
            "`vllm_importance_sampling_mode` is 'turn_mask', but SeeUPO trains turn by turn, and a turn that is left "
            "out would change the numbers of those after it. Use 'turn_truncate'.",
            "turn_truncate",
        )
    yield from step_problems(config)


def step_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    """Whether each update has one turn, as far as the batch settings are known."""
    steps, accumulation = config.steps_per_generation, config.gradient_accumulation_steps
    if POSITIVE_COUNT.allows(steps) and POSITIVE_COUNT.allows(accumulation) and steps % accumulation:
        yield Problem(
            "steps_per_generation",
            f"`steps_per_generation` is {steps}, but must be a multiple of `gradient_accumulation_steps`, which is "
            f"{accumulation}: an update would mix two turns.",
            accumulation,
        )


def turn_limit_problems(num_iterations: int, limit: int, where: str) -> Iterator[Problem]:
    """Whether there is an iteration for each turn, and no more.

    Args:
        num_iterations: of the trainer.
        limit: the most turns that a trajectory can have.
        where: what says so, such as "`max_turns` 2 + 1".
    """
    if num_iterations != limit:
        yield Problem(
            "num_iterations",
            f"`num_iterations` is {num_iterations}, but must be {limit}, the most turns that a trajectory can have "
            f"({where}): SeeUPO trains one turn in each iteration.",
            limit,
        )
