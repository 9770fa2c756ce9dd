"""Configuration of `SOPPOTrainer`."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field

from sorl_trl.trainers.base_config import TurnLevelConfig, check_choice, check_number

ADVANTAGE_LEVELS = ("turn", "token")
CRITICS = ("adapter", "head", "model")


@dataclass
class SOPPOConfig(TurnLevelConfig):
    """Configuration of [`SOPPOTrainer`]: [`TurnLevelConfig`] with advantages from a critic instead of the group.

    The defaults are SO-PPO with geometric turn ratios and two additions of ours, `target_kl` and a narrow lower clip
    range. docs/paper_to_code.md lists the settings of SO-PPO as specified, PPO, Turn-PPO, S-PPO and ST-PPO.

    Parameters:
        num_generations (`int`, defaults to `1`):
            Trajectories per prompt. There is no group baseline, so that one is enough.
        advantage_level (`str`, defaults to `"turn"`):
            The time step of the critic and of GAE: `"turn"` or `"token"`.
        gamma (`float`, defaults to `1.0`):
            Discount per time step.
        gae_lambda (`float`, defaults to `1.0`):
            λ of generalized advantage estimation; at 1, and γ = 1, Â = R - V.
        whiten_advantages (`bool`, defaults to `True`):
            Whether advantages get mean 0 and variance 1 over all ranks' trajectories of a rollout.
        kl_in_reward (`bool`, defaults to `False`):
            Whether `beta` times the KL to the reference is taken off the rewards rather than added to the loss.
        critic (`str`, *optional*):
            `"adapter"`, `"head"` or `"model"`; the default is `"adapter"` with PEFT, `"head"` without.
        critic_model_name_or_path (`str`, *optional*):
            What the critic starts from.
        critic_trunk_gradient (`bool`, defaults to `False`):
            Whether the value loss of `critic="head"` trains the policy's weights.
        critic_learning_rate (`float`, *optional*):
            Learning rate of the critic's parameters; `None` is ten times `learning_rate`.
        critic_warmup_steps (`int`, defaults to `0`):
            Optimizer steps at the start in which the critic learns and the policy stands still.
        vf_coef (`float`, defaults to `0.5`):
            Coefficient of the value loss.
        value_clip_range (`float`, *optional*, defaults to `0.2`):
            How far values may move from the rollout's; `None` is no clipping.
    """

    num_generations: int | None = field(
        default=1,
        metadata={"help": "Trajectories per prompt. The critic is the baseline, so one (the default) is enough."},
    )
    advantage_level: str = field(
        default="turn",
        metadata={
            "help": "The time step of the critic and of GAE. 'turn' (default): V is read where a turn starts, all "
            "tokens of a turn share its advantage. 'token': GAE over the policy's tokens, observations skipped."
        },
    )
    gamma: float = field(
        default=1.0,
        metadata={"help": "Discount per time step (turn or token, as `advantage_level` says), in [0, 1]."},
    )
    gae_lambda: float = field(
        default=1.0,
        metadata={
            "help": "Lambda of generalized advantage estimation, in [0, 1]: 1 (default) trusts the rewards alone, "
            "less trusts the critic more."
        },
    )
    whiten_advantages: bool = field(
        default=True,
        metadata={"help": "Scale the advantages of each rollout, over all ranks, to mean 0 and variance 1."},
    )
    kl_in_reward: bool = field(
        default=False,
        metadata={
            "help": "Take `beta` x (log-probability - reference log-probability) off each token's reward, instead "
            "of adding `beta` x KL to the loss."
        },
    )
    critic: str | None = field(
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
    critic_trunk_gradient: bool = field(
        default=False,
        metadata={"help": "Let the value loss of `critic='head'` train the policy's weights too."},
    )
    critic_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of the critic's parameters. Default: ten times `learning_rate`."},
    )
    critic_warmup_steps: int = field(
        default=0,
        metadata={
            "help": "Optimizer steps at the start in which only the critic learns: the policy's learning rate is 0."
        },
    )
    vf_coef: float = field(default=0.5, metadata={"help": "Coefficient of the value loss."})
    value_clip_range: float | None = field(
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

    def __post_init__(self) -> None:
        self._post_init_with_any_group_size()
        if self.critic_learning_rate is None:
            self.critic_learning_rate = 10 * self.learning_rate
        if self.scale_rewards != "none":
            warnings.warn(
                f"`scale_rewards={self.scale_rewards!r}` has no effect: advantages come from the critic. "
                "`whiten_advantages` scales them.",
                stacklevel=3,
            )
        self._check()

    def _post_init_with_any_group_size(self) -> None:
        """TRL refuses `num_generations=1`, which a group baseline cannot do with and a critic can.

        It gets to see another divisor of the batch, for its other checks and derived fields.
        """
        if self.num_generations != 1:
            super().__post_init__()
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
            super().__post_init__()
        finally:
            self.num_generations = 1

    def _check(self) -> None:
        check_choice("advantage_level", self.advantage_level, ADVANTAGE_LEVELS)
        if self.critic is not None:
            check_choice("critic", self.critic, CRITICS)
        check_number("gae_lambda", self.gae_lambda, most=1.0)
        check_number("vf_coef", self.vf_coef)
        check_number("critic_learning_rate", self.critic_learning_rate)
        check_number("critic_warmup_steps", self.critic_warmup_steps, whole=True)
        if self.value_clip_range is not None and not self.value_clip_range > 0:
            raise ValueError(
                f"`value_clip_range` is {self.value_clip_range}, but must be positive, or None for no clipping."
            )
        if self.kl_in_reward and self.beta == 0.0:
            raise ValueError("`kl_in_reward` is set, but `beta`, the coefficient of that KL, is 0.0. Set `beta`.")
        if self.critic_trunk_gradient and self.critic in ("adapter", "model"):
            raise ValueError(
                f"`critic_trunk_gradient` is set, but `critic={self.critic!r}` shares no trained weights with the "
                "policy. Use `critic='head'`, or leave it unset."
            )
        if self.critic_trunk_gradient and self.clip_normalization == "bias_norm":
            raise ValueError(
                "`clip_normalization='bias_norm'` divides the gradient of the policy's weights, and with "
                "`critic_trunk_gradient` the value loss is in it. Use one or the other."
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation` is {self.multi_objective_aggregation!r}, but the critic learns the "
                "weighted sum of the rewards: use 'sum_then_normalize'."
            )
