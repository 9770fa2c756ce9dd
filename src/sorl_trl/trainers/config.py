"""The options that the trainers of this package add to TRL's `GRPOConfig`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Annotated, Any

from trl import GRPOConfig, GRPOTrainer

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
    check_names,
)
from sorl_trl.methods.method import LOSS_TYPES
from sorl_trl.ops import IMPORTANCE_SAMPLING_LEVELS, TURN_RATIOS

OF_TRL: Mapping[str, Allowed] = {
    **dict.fromkeys(("learning_rate", "beta"), NOT_NEGATIVE),
    **dict.fromkeys(("epsilon", "epsilon_high"), Number(least=0, finite=False)),
    **dict.fromkeys(("num_generations", "num_generations_eval", "num_iterations"), POSITIVE_COUNT),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), POSITIVE_COUNT),
    **dict.fromkeys(("steps_per_generation", "generation_batch_size", "gradient_accumulation_steps"), POSITIVE_COUNT),
    **{"temperature": Number(above=0), "top_p": SHARE},
}
"""TRL's fields that TRL does not check before use, and their allowed values. YAML reads `1e-6` as text."""
PLAIN_SAMPLING: Mapping[str, Any] = {
    **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0},
    **{"frequency_penalty": 0.0, "logit_bias": {}, "allowed_token_ids": [], "bad_words": [], "min_tokens": 0},
    "structured_outputs": None,
}
"""The values, besides None, with which vLLM samples from the full softmax at the temperature."""


@dataclass
class TurnLevelConfig(GRPOConfig):
    """`trl.GRPOConfig` plus the options of turn-level training.

    The help of each field explains it (docs/reference/options.md). TRL's fields keep their meaning and default.
    Every default is a plain value, so writing it into a recipe changes nothing.
    """

    importance_sampling_level: Annotated[str, OneOf(IMPORTANCE_SAMPLING_LEVELS)] = field(
        default="turn",
        metadata={
            "help": "The unit that shares one importance ratio: 'turn' (default), as in SORL; 'token', as in PPO and "
            "GRPO; or 'sequence', as in GSPO."
        },
    )
    loss_type: Annotated[str, OneOf(tuple(LOSS_TYPES))] = field(
        default="turn",
        metadata={
            "help": "How token losses are averaged. 'turn' (default): over the tokens of each turn, then over turns, "
            "then over trajectories (the SO-PPO objective). The others are TRL's, with ratios of any level; 'cispo', "
            "'sapo' and 'vespo' have their own surrogates, which never zero a gradient."
        },
    )
    epsilon: float = field(
        default=0.28,
        metadata={
            "help": "How far the ratio of one token may fall below 1 before it is clipped, and rise above 1, unless "
            "`epsilon_high` is set; that of a turn of n tokens, with `scale_clip_range`, epsilon / n^(3/4). We chose "
            "0.28 (docs/evidence/results.md); TRL's default is 0.2."
        },
    )
    turn_ratio: Annotated[str, OneOf(TURN_RATIOS)] = field(
        default="geometric",
        metadata={
            "help": "How the token ratios of a turn are averaged. 'geometric' (default): exp of their mean logarithm, "
            "which is GSPO's length normalization applied per turn. 'arithmetic': their mean, as specified for SORL "
            "(docs/internals/equations.md)."
        },
    )
    scale_clip_range: Annotated[bool, SWITCH] = field(
        default=True,
        metadata={
            "help": "Our addition, not part of SORL: divide the clip range of a turn of n tokens (`epsilon`, "
            "`epsilon_high` and the distance of `delta` from 1) by n^(3/4), because the ratio of a long turn moves "
            "less than that of a short one. Ratios of tokens and sequences keep TRL's range."
        },
    )
    bias_norm: Annotated[bool, SWITCH] = field(
        default=False,
        metadata={
            "help": "Divide the gradient of each optimizer step by max(1, L2 norm of the clipping bias). This is "
            "ST-PPO's form of clipping-triggered normalization, known to us second-hand. Not with DeepSpeed or FSDP."
        },
    )
    target_kl: Annotated[float, NOT_NEGATIVE] = field(
        default=0.01,
        metadata={
            "help": "Our addition, not part of SORL: the KL to the old policy that the policy's learning rate aims "
            "for, in nats per token, times the root of a turn's length. An update with more than twice that KL "
            "divides the rate by 1.5; one with less than half multiplies it by 1.5. It stays between 1/100 of the "
            "scheduled rate and that rate, and starts at 1/10. 0 leaves the schedule unchanged."
        },
    )
    gamma: Annotated[float, SHARE] = field(
        default=1.0,
        metadata={"help": "Discount per turn, in [0, 1]; with SO-PPO, per unit of `advantage_level`."},
    )
    async_staleness: Annotated[int, COUNT] = field(
        default=0,
        metadata={
            "help": "Asynchronous rollouts: how many to sample while training on an earlier one. By default, this is "
            "also the most rollouts by which training lags. They come from a vLLM server or, for tests and small "
            "models, from copies of the policy in this process. 0 (default): sampling and training alternate."
        },
    )
    async_order: Annotated[str, OneOf(("dataset", "completed"))] = field(
        default="dataset",
        metadata={
            "help": "Which groups to train on next. 'dataset' (default): those of the next prompts. 'completed': "
            "those that finish first, for tasks where a few take very long. A slow group is overtaken for at most 2 x "
            "`async_staleness` batches, so it is at most 3 x `async_staleness` rollouts old."
        },
    )
    router_replay: Annotated[str, OneOf(("none", "r3"))] = field(
        default="none",
        metadata={
            "help": "'r3': train a mixture of experts with the experts that the sampling engine chose. 'none' "
            "(default): the routers choose anew in each pass."
        },
    )
    save_trajectories_steps: Annotated[int, COUNT] = field(
        default=0,
        metadata={
            "help": "Every so many optimizer steps, write the trajectories that the step trains on, with each token's "
            "ratio, advantage and clip state, to `<output_dir>/trajectories`. `sorl view <output_dir>` shows them. 0 "
            "(default): never."
        },
    )
    log_turn_details: Annotated[bool, SWITCH] = field(
        default=False,
        metadata={"help": "Log every metric of docs/reference/metrics.md instead of the dozen that matter most."},
    )
    disable_dropout: Annotated[bool, SWITCH] = field(
        default=True,
        metadata={
            "help": "Switch off random noise in training mode (dropout, and the router jitter of a mixture of "
            "experts) for model, adapters and critic. TRL's default is False. The noise makes policy and old policy "
            "differ before any update."
        },
    )

    def __new__(cls, *_: Any, **given: Any) -> TurnLevelConfig:
        check_names(cls, given, {"the trainer": ("method", *signature(GRPOTrainer).parameters)})
        return super().__new__(cls)

    method_name = ""
    """What trackers log as `method`. The trainer sets it."""

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | ({"method": self.method_name} if self.method_name else {})

    def __post_init__(self) -> None:
        check_fields(self, inherited=OF_TRL)
        super().__post_init__()
        if self.use_vllm and self.async_staleness:
            self._check_sampling()

    def _check_sampling(self) -> None:
        """Raise ValueError for options that change vLLM's log-probabilities but not the trainer's."""
        plain = {**PLAIN_SAMPLING, "temperature": self.temperature}
        given = {name: getattr(self, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
        given |= {"structured_outputs": self.vllm_structured_outputs_regex, **(self.generation_kwargs or {})}
        for name, value in given.items():
            if value is not None and value != plain.get(name, value) and (name, value) != ("top_k", -1):
                raise ValueError(
                    f"`{name}` is {value!r}, which changes vLLM's log-probabilities but not the trainer's: with "
                    f"`async_staleness`, ratios would not start at 1. Set it to {plain[name]!r}."
                )

    @property
    def cycle_steps(self) -> int:
        """How many micro-batches of a process are trained on between two rollouts."""
        return int(self.num_iterations) * int(self.steps_per_generation or 1)

    @property
    def updates_per_rollout(self) -> float:
        """How many optimizer steps train on one rollout."""
        return self.cycle_steps / int(self.gradient_accumulation_steps)

    @property
    def is_on_policy(self) -> bool:
        """Whether every update trains on trajectories that the current policy sampled, so that every ratio is 1.

        This is TRL's criterion for skipping the old log-probabilities.
        """
        return self.async_staleness == 0 and int(self.gradient_accumulation_steps) % self.cycle_steps == 0


@dataclass
class SOGRPOConfig(TurnLevelConfig):
    """Configuration of [`SOGRPOTrainer`]: [`TurnLevelConfig`] as it is, with defaults that train SO-GRPO.

    SORL contributes the turn-level importance ratios (geometric means) and, through the trainer's default method, a KL
    penalty. We chose the penalty's gate, and added `target_kl` as a safeguard.
    """


@dataclass
class SOPPOConfig(TurnLevelConfig):
    """Configuration of [`SOPPOTrainer`]: [`TurnLevelConfig`] plus the options of the critic.

    The help of each field explains it; docs/reference/options.md lists them all.
    """

    num_generations: int | None = field(
        default=1,
        metadata={"help": "Trajectories per prompt. One (default) is enough, because the critic is the baseline."},
    )
    advantage_level: Annotated[str, OneOf(("turn", "token"))] = field(
        default="turn",
        metadata={
            "help": "The unit that is one time step for critic and GAE, and shares an advantage: 'turn' (default) or "
            "'token'. Observations are skipped. The critic is read before a unit's first token."
        },
    )
    gae_lambda: Annotated[float, SHARE] = field(
        default=1.0,
        metadata={
            "help": "Lambda of generalized advantage estimation, in [0, 1]. 1 (default) relies only on the rewards; "
            "a lower value relies more on the critic."
        },
    )
    whiten_advantages: Annotated[bool, SWITCH] = field(
        default=True,
        metadata={"help": "Scale the advantages of each rollout to mean 0 and variance 1, over all processes."},
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
            "help": "What the critic starts from: a run's output folder, a checkpoint, or its `critic/` folder. With "
            "`critic='model'`, also the id or path of any model, for its backbone (default: the policy's)."
        },
    )
    value_head_learning_rate: Annotated[float, NOT_NEGATIVE] = field(
        default=0.1,
        metadata={
            "help": "Learning rate of the critic's head, in units of the return: one step of Adam moves a value by at "
            "most about twice this, in models of any size. Scale it with your rewards."
        },
    )
    critic_learning_rate: Annotated[float | None, NOT_NEGATIVE] = field(
        default=None,
        metadata={
            "help": "Learning rate of the critic's adapter or value model. Default: ten times `learning_rate`; for a "
            "value model beside a PEFT policy, `learning_rate` itself, because PEFT's rates are already that much "
            "higher."
        },
    )
    critic_warmup_steps: Annotated[int, COUNT] = field(
        default=0,
        metadata={"help": "How many optimizer steps at the start train only the critic, not the policy."},
    )
    vf_coef: Annotated[float, NOT_NEGATIVE] = field(default=0.5, metadata={"help": "Coefficient of the value loss."})
    value_clip_range: Annotated[float | None, Number(above=0, finite=False)] = field(
        default=0.2,
        metadata={
            "help": "PPO's value clipping: how far, in units of the return, a value may move from the rollout's value "
            "before its gradient is clipped to 0. None: no clipping."
        },
    )
    scale_rewards: str = field(
        default="none",
        metadata={"help": "Must be 'none': `whiten_advantages` replaces scaling by the group's spread."},
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False,
        metadata={
            "help": "Whether DDP looks for parameters without a gradient. False (default) is right unless the model "
            "is a mixture of experts or only some prompts have images, because policy and critic take part in every "
            "step."
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
                    "A rollout has one trajectory, but needs at least two, because one has no spread to learn from. "
                    "Raise `per_device_train_batch_size`, `steps_per_generation` or `generation_batch_size` to at "
                    "least 2."
                )
        super().__post_init__()
        if is_alone:
            self.num_generations = 1
        if self.scale_rewards != "none":
            raise ValueError(
                f"`scale_rewards` is {self.scale_rewards!r}, but must be 'none': advantages come from the critic, and "
                "`whiten_advantages` scales them."
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation` is {self.multi_objective_aggregation!r}, but the critic learns the "
                "weighted sum of the rewards: use 'sum_then_normalize'."
            )
