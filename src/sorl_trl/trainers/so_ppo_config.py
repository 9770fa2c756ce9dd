"""Configuration of `SOPPOTrainer`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from sorl_trl.checks import COUNT, NOT_NEGATIVE, SHARE, SWITCH, Number, OneOf, Problem
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.config_docs import documented
from sorl_trl.trainers.config_rules import critic_problems
from sorl_trl.trainers.options.credit_rules import critic_credit_problems
from sorl_trl.trainers.options.group_rules import critic_group_problems

ADVANTAGE_LEVELS = ("turn", "token")
CRITICS = ("adapter", "head", "model")


@documented
@dataclass
class SOPPOConfig(TurnLevelConfig):
    """Configuration of [`SOPPOTrainer`]: [`TurnLevelConfig`] with advantages from a critic instead of the group.

    The defaults are turn-level advantages, as in SO-PPO, sequence ratios whose clip range narrows as sequences grow
    longer, and a learning rate that follows the KL: what held best (docs/results.md). docs/paper_index.md lists the
    settings of SO-PPO as specified, PPO, Turn-PPO, S-PPO and ST-PPO.
    """

    num_generations: int | None = field(
        default=1,
        metadata={"help": "Trajectories per prompt. The critic is the baseline, so one (the default) is enough."},
    )
    advantage_level: Annotated[str, OneOf(ADVANTAGE_LEVELS)] = field(
        default="turn",
        metadata={
            "help": "The time step of the critic and of GAE. 'turn' (default): V is read where a turn starts, all "
            "tokens of a turn share its advantage. 'token': GAE over the policy's tokens, observations skipped."
        },
    )
    gamma: Annotated[float, SHARE] = field(
        default=1.0,
        metadata={"help": "Discount per time step (turn or token, as `advantage_level` says), in [0, 1]."},
    )
    gae_lambda: Annotated[float, SHARE] = field(
        default=1.0,
        metadata={
            "help": "Lambda of generalized advantage estimation, in [0, 1]: 1 (default) trusts the rewards alone, "
            "less trusts the critic more."
        },
    )
    whiten_advantages: Annotated[bool, SWITCH] = field(
        default=True,
        metadata={"help": "Scale the advantages of each rollout, over all ranks, to mean 0 and variance 1."},
    )
    kl_in_reward: Annotated[bool, SWITCH] = field(
        default=False,
        metadata={
            "help": "Take `beta` x (log-probability - reference log-probability) off each token's reward, instead "
            "of adding `beta` x KL to the loss."
        },
    )
    critic: Annotated[str | None, OneOf(CRITICS)] = field(
        default=None,
        metadata={
            "help": "Where values come from. 'adapter': a second LoRA adapter and a scalar head on the frozen base "
            "(default with PEFT). 'head': a scalar head on the policy's hidden states (default without PEFT). "
            "'model': a value model of its own."
        },
    )
    critic_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "What the critic starts from: the `critic/` folder of a checkpoint, for every kind; for 'model' "
            "also any model id or path, whose backbone it takes (default: the policy's own)."
        },
    )
    critic_trunk_gradient: Annotated[bool, SWITCH] = field(
        default=False,
        metadata={"help": "Let the value loss of `critic='head'` train the policy's weights too."},
    )
    critic_learning_rate: Annotated[float | None, NOT_NEGATIVE] = field(
        default=None,
        metadata={"help": "Learning rate of the critic's parameters. Default: ten times `learning_rate`."},
    )
    critic_warmup_steps: Annotated[int, COUNT] = field(
        default=0,
        metadata={
            "help": "Optimizer steps at the start in which only the critic learns: the policy's learning rate is 0."
        },
    )
    vf_coef: Annotated[float, NOT_NEGATIVE] = field(default=0.5, metadata={"help": "Coefficient of the value loss."})
    value_clip_range: Annotated[float | None, Number(above=0, finite=False)] = field(
        default=0.2,
        metadata={
            "help": "PPO's value clipping: how far, in units of the return, a value may move from the rollout's "
            "before its loss stops pulling. None: no clipping."
        },
    )
    num_generations_eval: int | None = field(
        default=None,
        metadata={"help": "Trajectories per prompt in evaluation. Default: `num_generations`."},
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False,
        metadata={
            "help": "DDP's search for parameters without a gradient. Policy and critic take part in every step, so "
            "False (the default) is right but for mixtures of experts and images that only some prompts have."
        },
    )
    scale_rewards: str = field(
        default="none",
        metadata={"help": "Scaling by the group's spread, which a critic replaces: only 'none'."},
    )

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from critic_problems(self)
        yield from critic_group_problems(self)
        yield from critic_credit_problems(self)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic_learning_rate is None:
            self.critic_learning_rate = 10 * self.learning_rate
        if self.scale_rewards != "none":
            warnings.warn(
                f"`scale_rewards={self.scale_rewards!r}` has no effect: advantages come from the critic. "
                "`whiten_advantages` scales them.",
                stacklevel=3,
            )

    def _post_init_of_trl(self) -> None:
        """TRL refuses `num_generations=1`, which a group baseline cannot do with and a critic can.

        It gets to see another divisor of the batch, for its other checks and derived fields.
        """
        if self.num_generations != 1:
            super()._post_init_of_trl()
            return
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        processes = int(os.environ.get("WORLD_SIZE", 1))  # transformers knows it only after `__post_init__`
        self.num_generations = self.generation_batch_size or self.per_device_train_batch_size * steps * processes
        if self.num_generations < 2:
            raise ValueError(
                "`per_device_train_batch_size` is 1, and so are the micro-batches per rollout and the processes. Set "
                "one of them, or `generation_batch_size`, to at least 2: one trajectory has no spread to learn from."
            )
        if self.num_generations_eval is None:
            self.num_generations_eval = 1
        try:
            super()._post_init_of_trl()
        finally:
            self.num_generations = 1
