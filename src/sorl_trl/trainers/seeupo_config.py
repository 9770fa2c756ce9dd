"""Configuration of `SeeUPOTrainer`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from sorl_trl.checks import NOT_NEGATIVE, OneOf, Problem, raise_first
from sorl_trl.ops import CLIP_RANGE_SCALINGS, IMPORTANCE_SAMPLING_LEVELS
from sorl_trl.trainers.config_docs import documented
from sorl_trl.trainers.options.backward_rules import backward_problems, step_problems
from sorl_trl.trainers.so_grpo_config import SOGRPOConfig


@documented
@dataclass
class SeeUPOConfig(SOGRPOConfig):
    """Configuration of [`SeeUPOTrainer`]: [`SOGRPOConfig`], with SeeUPO's advantages, one turn at a time.

    Set `num_iterations` to the most turns that a trajectory can have: `max_turns` + 1 with `SearchRollout`,
    `max_tool_calling_iterations` + 1 in TRL's tool loop. Each iteration trains one turn, the last one first, and makes
    `steps_per_generation` / `gradient_accumulation_steps` updates, each on trajectories of its own. With one, every
    ratio is 1 when it is trained on, and nothing is clipped.

    What compares the trajectories of a group, or looks at several turns together, has no meaning here and is refused.
    """

    keeps_old_policy: ClassVar[bool] = False

    importance_sampling_level: Annotated[str | None, OneOf(IMPORTANCE_SAMPLING_LEVELS)] = field(
        default="turn",
        metadata={
            "help": "The unit that shares one importance ratio: 'turn' (default), as in SeeUPO. 'token' and "
            "'sequence' are refused."
        },
    )
    clip_range_scaling: Annotated[str | None, OneOf(CLIP_RANGE_SCALINGS)] = field(
        default="none",
        metadata={
            "help": "Ours, no part of SeeUPO: how the clip range narrows as the turn grows longer. 'none' (default): "
            "it does not; 'sqrt_length' and 'length' as in `SOGRPOConfig`."
        },
    )
    target_kl: Annotated[float, NOT_NEGATIVE] = field(
        default=0.0,
        metadata={
            "help": "Ours, no part of SeeUPO: as in `SOGRPOConfig`, with the KL to the policy from before the turn "
            "that is trained. 0 (default): the learning rate is as scheduled."
        },
    )
    scale_rewards: str = field(
        default="batch",
        metadata={
            "help": "Scaling of the advantages: only 'batch', the spread of the trajectories that have the turn."
        },
    )

    def problems(self) -> Iterator[Problem]:
        yield from backward_problems(self)
        yield from super().problems()

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_first(step_problems(self))  # TRL has filled in `steps_per_generation`
