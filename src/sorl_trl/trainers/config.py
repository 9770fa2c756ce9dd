"""What the trainers of this package add to TRL's `GRPOConfig`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from trl import GRPOConfig

from sorl_trl.checks import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE_COUNT,
    SHARE,
    SWITCH,
    Allowed,
    Number,
    OneOf,
    check_fields,
)
from sorl_trl.ops import CLIP_RANGE_SCALINGS, IMPORTANCE_SAMPLING_LEVELS, TURN_RATIOS

OUR_LOSS_TYPES = ("turn", "grpo", "dr_grpo", "dapo", "bnpo")
"""The loss types that the loss of this package computes, with every level and every surrogate."""
TRLS_LOSS_TYPES = ("cispo", "sapo", "luspo", "vespo")
"""The loss types that TRL alone computes."""
ADVANTAGE_LEVELS = ("turn", "token")
CRITICS = ("adapter", "head", "model")
_OF_TRL: Mapping[str, Allowed] = {
    "epsilon": NOT_NEGATIVE,
    "epsilon_high": NOT_NEGATIVE,
    "num_generations": POSITIVE_COUNT,
    "num_generations_eval": POSITIVE_COUNT,
    "per_device_train_batch_size": POSITIVE_COUNT,
    "per_device_eval_batch_size": POSITIVE_COUNT,
    "steps_per_generation": POSITIVE_COUNT,
    "generation_batch_size": POSITIVE_COUNT,
    "gradient_accumulation_steps": POSITIVE_COUNT,
    "num_iterations": POSITIVE_COUNT,
}
"""Fields of TRL's, which divides by them or compares with them without a look, and what they allow."""


@dataclass
class TurnLevelConfig(GRPOConfig):
    """`trl.GRPOConfig` with what turn-level training needs beside it.

    Every parameter that is not listed here is TRL's, with TRL's meaning and default. Every default is a plain value:
    writing it down changes nothing.

    Parameters:
        importance_sampling_level: The unit that shares one importance ratio: "turn" (SORL), "token" (PPO, GRPO) or
            "sequence" (GSPO).
        loss_type: How the losses of tokens are averaged: "turn" over the tokens of each turn, the turns of each
            trajectory, then trajectories (the SO-PPO objective), or any loss type of TRL's.
        turn_ratio: How the token ratios of a turn become one, "geometric" or "arithmetic".
        clip_range_scaling: Ours: by what the clip range is divided as a unit grows longer.
        bias_norm: Clipping-triggered normalization as ST-PPO has it.
        target_kl: Ours: the KL to the old policy near which the learning rate holds the policy.
        gamma: Discount per turn.
        rollout_staleness: How many rollouts late each rollout is trained on.
        save_trajectories_steps: Every how many steps to write the trajectories that are trained on.
        turn_boundary_tags: Closing tags after which a new turn starts.
        disable_dropout: Set every dropout probability to 0 (TRL's default is False).
    """

    importance_sampling_level: Annotated[str, OneOf(IMPORTANCE_SAMPLING_LEVELS)] = field(
        default="turn",
        metadata={
            "help": "The unit that shares one importance ratio: 'turn' (default), as in SORL; 'token', as in PPO and "
            "GRPO; or 'sequence', as in GSPO, where turns with advantages of their own keep them (GSPO-token)."
        },
    )
    loss_type: Annotated[str, OneOf((*OUR_LOSS_TYPES, *TRLS_LOSS_TYPES))] = field(
        default="turn",
        metadata={
            "help": "How the losses of tokens are averaged. 'turn' (default): over the tokens of each turn, then over "
            "the turns of each trajectory, then over trajectories (the SO-PPO objective). 'grpo', 'dr_grpo', 'dapo', "
            "'bnpo', 'cispo', 'sapo', 'luspo' and 'vespo' are TRL's; the last four know no turns: set "
            "`importance_sampling_level` to 'token' or 'sequence'."
        },
    )
    turn_ratio: Annotated[str, OneOf(TURN_RATIOS)] = field(
        default="geometric",
        metadata={
            "help": "How the token ratios of a turn become one. 'geometric' (default): exp of their mean logarithm, "
            "GSPO's length normalization applied per turn. 'arithmetic': their mean, as in the note on SORL."
        },
    )
    clip_range_scaling: Annotated[str, OneOf(CLIP_RANGE_SCALINGS)] = field(
        default="none",
        metadata={
            "help": "Ours, no part of SORL: by what the clip range (`epsilon`, `epsilon_high` and the distance of "
            "`delta` from 1) is divided as the turn or sequence grows longer. 'none' (default): by 1; 'sqrt_length': "
            "by the square root of its tokens; 'length': by their number, up to 500."
        },
    )
    bias_norm: Annotated[bool, SWITCH] = field(
        default=False,
        metadata={
            "help": "Clipping-triggered normalization as ST-PPO has it, second-hand: divide the gradient of each "
            "optimizer step by max(1, L2 norm of the clipping bias). Not with DeepSpeed or FSDP."
        },
    )
    target_kl: Annotated[float, NOT_NEGATIVE] = field(
        default=0.005,
        metadata={
            "help": "Ours, no part of SORL: KL to the old policy, in nats per token, near which the policy's learning "
            "rate is to hold it. An update that finds more than twice as much divides the learning rate by 1.5, one "
            "that finds less than half as much multiplies it by 1.5; it stays between 1/100 of the scheduled one and "
            "the scheduled one. 0: as scheduled."
        },
    )
    gamma: Annotated[float, SHARE] = field(
        default=1.0,
        metadata={"help": "Discount per turn, in [0, 1]: a reward k turns later counts gamma**k."},
    )
    rollout_staleness: Annotated[int, COUNT] = field(
        default=0,
        metadata={
            "help": "How many rollouts late each rollout is trained on (0: at once), with the old log-probabilities "
            "of the policy that sampled it: what an asynchronous trainer does, at a fixed lag."
        },
    )
    save_trajectories_steps: Annotated[int, COUNT] = field(
        default=0,
        metadata={
            "help": "Every how many optimizer steps to write the trajectories that the step trains on, with ratio, "
            "advantage and clip state of every token, to `<output_dir>/trajectories`: `sorl view <output_dir>` shows "
            "them. 0 (default): never."
        },
    )
    turn_boundary_tags: list[str] | None = field(
        default=None,
        metadata={
            "help": "Closing tags, such as `</think>`, after each of which a new turn starts. None (default): turns are "
            "those that the rollout recorded, else the runs of model tokens between observations."
        },
    )
    disable_dropout: Annotated[bool, SWITCH] = field(
        default=True,
        metadata={
            "help": "Set every dropout probability of the model, of its adapters and of the critic to 0 (TRL's "
            "default is False). With dropout, policy and old policy differ by its noise before any update."
        },
    )

    def __post_init__(self) -> None:
        check_fields(self, inherited=_OF_TRL)
        if self.loss_type in TRLS_LOSS_TYPES:
            self._check_trls_loss()
        if self.clip_range_scaling == "length" and self.turn_ratio == "arithmetic":
            raise ValueError(
                "`clip_range_scaling` is 'length', but that is for geometric means: with `turn_ratio='arithmetic'` set "
                "'sqrt_length'."
            )
        if isinstance(self.turn_boundary_tags, str) or (self.turn_boundary_tags and not all(self.turn_boundary_tags)):
            raise ValueError(f"`turn_boundary_tags` is {self.turn_boundary_tags!r}, but must be a list of tags or None.")
        super().__post_init__()

    def _check_trls_loss(self) -> None:
        of_type = f"`loss_type` is {self.loss_type!r}, which TRL computes"
        if self.importance_sampling_level == "turn":
            raise ValueError(f"{of_type}: set `importance_sampling_level` to 'token' or 'sequence'.")
        if self.clip_range_scaling != "none":
            raise ValueError(f"{of_type} with its own range: set `clip_range_scaling='none'`.")
        if self.bias_norm:
            raise ValueError(f"{of_type}, and `bias_norm` needs a loss of this package: set it to False.")

    @property
    def updates_per_rollout(self) -> float:
        """Optimizer steps on one rollout."""
        return int(self.num_iterations) * int(self.steps_per_generation or 1) / int(self.gradient_accumulation_steps)

    @property
    def is_on_policy(self) -> bool:
        """Whether every update trains on what the policy has just sampled, so that every ratio is 1.

        It is TRL's criterion for doing without old log-probabilities.
        """
        micro_batches = int(self.num_iterations) * int(self.steps_per_generation or 1)
        return self.rollout_staleness == 0 and int(self.gradient_accumulation_steps) % micro_batches == 0


@dataclass
class SOGRPOConfig(TurnLevelConfig):
    """Configuration of [`SOGRPOTrainer`]: [`TurnLevelConfig`], whose defaults train SO-GRPO.

    Turn-level importance ratios (geometric mean) and, by the trainer's default method, the clipping-triggered penalty
    are SORL's; `target_kl` stands beside them as our safeguard.
    """


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
    advantage_level: Annotated[str, OneOf(ADVANTAGE_LEVELS)] = field(
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
        check_fields(self, inherited=_OF_TRL)
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
