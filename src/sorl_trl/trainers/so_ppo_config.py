"""Configuration of `SOPPOTrainer`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated

from sorl_trl.checks import COUNT, NOT_NEGATIVE, SHARE, SWITCH, Number, OneOf, check_fields
from sorl_trl.trainers.config import OF_TRL, TRLS_LOSS_TYPES, TurnLevelConfig


@dataclass
class SOPPOConfig(TurnLevelConfig):
    """Configuration of [`SOPPOTrainer`]: [`TurnLevelConfig`] with advantages from a critic instead of the group.

    Parameters:
        advantage_level: The time step of the critic and of GAE, "turn" or "token".
        gae_lambda: Lambda of generalized advantage estimation.
        whiten_advantages: Scale the advantages of each rollout to mean 0 and variance 1.
        kl_in_reward: Take the reference KL off the rewards instead of adding it to the loss.
        critic: "adapter", "head" or "model"; None chooses.
        critic_model_name_or_path: What the critic starts from.
        critic_trunk_gradient: Let the value loss of `critic="head"` train the policy's weights.
        critic_learning_rate: None is ten times `learning_rate`.
        critic_warmup_steps: Steps at the start in which only the critic learns.
        vf_coef: Coefficient of the value loss.
        value_clip_range: How far a value may move from the rollout's before its loss stops pulling.
        num_generations: Trajectories per prompt; the critic is the baseline, so that one is enough.
    """

    num_generations: int | None = field(
        default=1,
        metadata={"help": "Trajectories per prompt. The critic is the baseline, so one (the default) is enough."},
    )
    num_generations_eval: int | None = field(
        default=None,
        metadata={"help": "Trajectories per prompt in evaluation. Default: `num_generations`."},
    )
    advantage_level: Annotated[str, OneOf(("turn", "token"))] = field(
        default="turn",
        metadata={
            "help": "The time step of the critic and of GAE. 'turn' (default): V is read where a turn starts, all "
            "tokens of a turn share its advantage. 'token': GAE over the policy's tokens, observations skipped."
        },
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
    critic: Annotated[str | None, OneOf(("adapter", "head", "model"))] = field(
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
    scale_rewards: str = field(
        default="none",
        metadata={"help": "Scaling by the group's spread, which a critic replaces: only 'none'."},
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False,
        metadata={
            "help": "DDP's search for parameters without a gradient. Policy and critic take part in every step, so "
            "False (the default) is right but for mixtures of experts and images that only some prompts have."
        },
    )

    def __post_init__(self) -> None:
        if self.num_generations == 1:
            self._post_init_of_one_generation()
        else:
            super().__post_init__()
        if self.critic_learning_rate is None:
            self.critic_learning_rate = 10 * self.learning_rate
        self._check_critic()

    def _check_critic(self) -> None:
        if self.scale_rewards != "none":
            raise ValueError(
                f"`scale_rewards` is {self.scale_rewards!r}, but must be 'none': advantages come from the critic, and "
                "`whiten_advantages` scales them."
            )
        if self.kl_in_reward and self.beta == 0.0:
            raise ValueError("`kl_in_reward` is set, but `beta`, the coefficient of that KL, is 0.0: set `beta`.")
        if self.kl_in_reward and self.loss_type in TRLS_LOSS_TYPES:
            raise ValueError(f"`kl_in_reward` is set, but `loss_type={self.loss_type!r}` takes the KL in the loss.")
        if self.critic_trunk_gradient and (self.critic in ("adapter", "model") or self.bias_norm):
            raise ValueError(
                "`critic_trunk_gradient` is set, but is for `critic='head'` without `bias_norm`, where the value loss "
                "reaches the policy's weights."
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation` is {self.multi_objective_aggregation!r}, but the critic learns the "
                "weighted sum of the rewards: use 'sum_then_normalize'."
            )

    def _post_init_of_one_generation(self) -> None:
        """TRL refuses `num_generations=1`, which a group baseline cannot do with and a critic can.

        It gets to see another divisor of the batch, for its other checks and derived fields.
        """
        check_fields(self, inherited=OF_TRL)
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        processes = int(os.environ.get("WORLD_SIZE", 1))  # transformers knows it only after `__post_init__`
        divisor = self.generation_batch_size or self.per_device_train_batch_size * steps * processes
        if divisor < 2:
            raise ValueError(
                "`per_device_train_batch_size` is 1, and so are the micro-batches per rollout and the processes. Set "
                "one of them, or `generation_batch_size`, to at least 2: one trajectory has no spread to learn from."
            )
        self.num_generations = divisor
        self.num_generations_eval = self.num_generations_eval or 1
        super().__post_init__()
        self.num_generations = 1
