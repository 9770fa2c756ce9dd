"""Configuration of `SOPPOTrainer`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated

from sorl_trl.checks import COUNT, NOT_NEGATIVE, SHARE, SWITCH, Number, OneOf, check_fields
from sorl_trl.trainers.config import OF_TRL, TurnLevelConfig


@dataclass
class SOPPOConfig(TurnLevelConfig):
    """Configuration of [`SOPPOTrainer`]: [`TurnLevelConfig`] plus the options of the critic.

    The help of each field explains it; docs/options.md lists them all.
    """

    num_generations: int | None = field(
        default=1,
        metadata={"help": "Trajectories per prompt. One (default) is enough, because the critic is the baseline."},
    )
    advantage_level: Annotated[str, OneOf(("turn", "token"))] = field(
        default="turn",
        metadata={
            "help": "The time step of the critic and of GAE. 'turn' (default): V is read where a turn starts, and all "
            "tokens of a turn share its advantage. 'token': GAE runs over the policy's tokens and skips observations."
        },
    )
    gae_lambda: Annotated[float, SHARE] = field(
        default=1.0,
        metadata={
            "help": "Lambda of generalized advantage estimation, in [0, 1]. 1 (default) relies on the rewards alone; "
            "a lower value relies more on the critic."
        },
    )
    whiten_advantages: Annotated[bool, SWITCH] = field(
        default=True,
        metadata={"help": "Scale the advantages of each rollout to mean 0 and variance 1, over all processes."},
    )
    kl_in_reward: Annotated[bool, SWITCH] = field(
        default=False,
        metadata={
            "help": "Subtract `beta` x (log-probability - reference log-probability) from each token's reward "
            "instead of adding `beta` x KL to the loss."
        },
    )
    critic: Annotated[str | None, OneOf(("adapter", "head", "model"))] = field(
        default=None,
        metadata={
            "help": "Where values come from. 'adapter': a second LoRA adapter and a scalar head on the frozen base "
            "model (default with PEFT). 'head': a scalar head on the policy's hidden states (default without PEFT). "
            "'model': a separate value model."
        },
    )
    critic_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "What the critic starts from: a run's output folder, a checkpoint, or its `critic/` folder; with "
            "`critic='model'` also any model, by id or path, whose backbone it takes (default: the policy's)."
        },
    )
    critic_trunk_gradient: Annotated[bool, SWITCH] = field(
        default=False,
        metadata={"help": "Let the value loss of `critic='head'` train the policy's weights too."},
    )
    value_head_learning_rate: Annotated[float, NOT_NEGATIVE] = field(
        default=0.1,
        metadata={
            "help": "Learning rate of the critic's head, in units of the return: a step of Adam moves a value by at "
            "most about twice this, in models of any size. Scale it with your rewards."
        },
    )
    critic_learning_rate: Annotated[float | None, NOT_NEGATIVE] = field(
        default=None,
        metadata={
            "help": "Learning rate of the critic's adapter or value model. Default: ten times `learning_rate`, but "
            "`learning_rate` for a value model beside a policy with PEFT, whose rate is that much higher already."
        },
    )
    critic_warmup_steps: Annotated[int, COUNT] = field(
        default=0,
        metadata={"help": "How many optimizer steps at the start train only the critic, and not the policy."},
    )
    vf_coef: Annotated[float, NOT_NEGATIVE] = field(default=0.5, metadata={"help": "Coefficient of the value loss."})
    value_clip_range: Annotated[float | None, Number(above=0, finite=False)] = field(
        default=0.2,
        metadata={
            "help": "PPO's value clipping: how far, in units of the return, a value may move from the rollout's value "
            "before its gradient is clipped away. None: no clipping."
        },
    )
    scale_rewards: str = field(
        default="none",
        metadata={"help": "Must be 'none': `whiten_advantages` takes the place of scaling by the group's spread."},
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False,
        metadata={
            "help": "Whether DDP looks for parameters without a gradient. False (default) is right unless the model "
            "is a mixture of experts or only some prompts have images: policy and critic take part in every step."
        },
    )

    def __post_init__(self) -> None:
        is_alone = self.num_generations == 1
        if is_alone:
            # TRL refuses 1, which is too few for a group baseline but enough for a critic: show it one group.
            check_fields(self, inherited=OF_TRL)
            steps = self.steps_per_generation or self.gradient_accumulation_steps
            processes = int(os.environ.get("WORLD_SIZE", 1))  # transformers knows it only after `__post_init__`
            self.num_generations = self.generation_batch_size or self.per_device_train_batch_size * steps * processes
            self.num_generations_eval: int = self.num_generations_eval or 1
            if self.num_generations < 2:
                raise ValueError(
                    "A rollout has one trajectory, but needs two: one has no spread to learn from. Raise "
                    "`per_device_train_batch_size`, `steps_per_generation` or `generation_batch_size` to at least 2."
                )
        super().__post_init__()
        if is_alone:
            self.num_generations = 1
        if self.scale_rewards != "none":
            raise ValueError(
                f"`scale_rewards` is {self.scale_rewards!r}, but must be 'none': advantages come from the critic, and "
                "`whiten_advantages` scales them."
            )
        if self.kl_in_reward and self.beta == 0.0:
            raise ValueError("`kl_in_reward` is set, but `beta`, the coefficient of that KL, is 0.0: set `beta`.")
        if self.critic_trunk_gradient and (self.critic in ("adapter", "model") or self.bias_norm):
            raise ValueError(
                "`critic_trunk_gradient` is set, but needs `critic='head'` without `bias_norm`: only there can the "
                "value loss train the policy's weights."
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation` is {self.multi_objective_aggregation!r}, but the critic learns the "
                "weighted sum of the rewards: use 'sum_then_normalize'."
            )
