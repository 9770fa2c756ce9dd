"""What the trainers of this package add to TRL's `GRPOConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

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

TRLS_LOSS_TYPES = ("cispo", "sapo", "luspo", "vespo")
"""The loss types that TRL alone computes."""
OF_TRL: Mapping[str, Allowed] = {
    "learning_rate": NOT_NEGATIVE,
    "beta": NOT_NEGATIVE,
    "epsilon": Number(least=0, finite=False),
    "epsilon_high": Number(least=0, finite=False),
    "num_generations": POSITIVE_COUNT,
    "num_generations_eval": POSITIVE_COUNT,
    "per_device_train_batch_size": POSITIVE_COUNT,
    "per_device_eval_batch_size": POSITIVE_COUNT,
    "steps_per_generation": POSITIVE_COUNT,
    "generation_batch_size": POSITIVE_COUNT,
    "gradient_accumulation_steps": POSITIVE_COUNT,
    "num_iterations": POSITIVE_COUNT,
    "temperature": Number(above=0),
    "top_p": SHARE,
}
"""Fields of TRL's and what they allow. Nobody else checks them before the run begins; YAML reads `1e-6` as a text."""


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
        epsilon: How far a ratio may fall below 1 before it is clipped (TRL's default is 0.2).
        turn_ratio: How the token ratios of a turn become one, "geometric" or "arithmetic".
        clip_range_scaling: Ours: by what the clip range is divided as a unit grows longer.
        bias_norm: Clipping-triggered normalization as ST-PPO has it.
        target_kl: Ours: the KL to the old policy near which the learning rate holds the policy.
        gamma: Discount per turn.
        async_staleness: How many rollouts are sampled ahead, while one is trained on.
        async_order: Which of these is trained on next: of the "dataset", or "completed" first.
        async_old_policy: What ratios then compare with: "behaviour" or "proximal".
        save_trajectories_steps: Every how many steps to write the trajectories that are trained on.
        log_turn_details: Log every metric instead of the dozen that matter most.
        disable_dropout: Set every dropout probability to 0 (TRL's default is False).
    """

    importance_sampling_level: Annotated[str, OneOf(IMPORTANCE_SAMPLING_LEVELS)] = field(
        default="turn",
        metadata={
            "help": "The unit that shares one importance ratio: 'turn' (default), as in SORL; 'token', as in PPO and "
            "GRPO; or 'sequence', as in GSPO, where turns with advantages of their own keep them (GSPO-token)."
        },
    )
    loss_type: Annotated[str, OneOf(("turn", "grpo", "dr_grpo", "dapo", "bnpo", *TRLS_LOSS_TYPES))] = field(
        default="turn",
        metadata={
            "help": "How the losses of tokens are averaged. 'turn' (default): over the tokens of each turn, then over "
            "the turns of each trajectory, then over trajectories (the SO-PPO objective). 'grpo', 'dr_grpo', 'dapo', "
            "'bnpo', 'cispo', 'sapo', 'luspo' and 'vespo' are TRL's; the last four know no turns: with "
            "them an `importance_sampling_level` of 'turn' becomes 'token'."
        },
    )
    epsilon: float = field(
        default=0.1,
        metadata={
            "help": "How far a ratio may fall below 1, and rise above it unless `epsilon_high` is set, before it is "
            "clipped. Ours: 0.1, chosen for the ratios of turns (docs/results.md); TRL's default is 0.2."
        },
    )
    turn_ratio: Annotated[str, OneOf(TURN_RATIOS)] = field(
        default="geometric",
        metadata={
            "help": "How the token ratios of a turn become one. 'geometric' (default): exp of their mean logarithm, "
            "GSPO's length normalization applied per turn. 'arithmetic': their mean, as specified for SORL "
            "(docs/paper_to_code.md)."
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
    async_staleness: Annotated[int, COUNT] = field(
        default=0,
        metadata={
            "help": "Sample so many rollouts ahead, while one is trained on; by default none is trained on more than "
            "so many rollouts late. With a vLLM server, or, for tests and small models, with copies of the policy in "
            "this process. 0 (default): sampling and training take turns."
        },
    )
    async_order: Annotated[str, OneOf(("dataset", "completed"))] = field(
        default="dataset",
        metadata={
            "help": "Which rollouts are trained on next. 'dataset' (default): those of the next prompts. 'completed': "
            "the groups that are there first, where a few take very long; such a group is passed by for twice "
            "`async_staleness` batches at the most, and is up to three times as many rollouts late."
        },
    )
    async_old_policy: Annotated[str, OneOf(("behaviour", "proximal"))] = field(
        default="behaviour",
        metadata={
            "help": "What ratios compare with where rollouts are sampled ahead. 'behaviour' (default): the policy "
            "that sampled. 'proximal': the policy as it is when it begins to train on the rollout, each turn "
            "weighted by its ratio to the one that sampled, cut at 2 (AReaL's decoupled objective)."
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
    log_turn_details: Annotated[bool, SWITCH] = field(
        default=False,
        metadata={"help": "Log every metric of docs/metrics.md, and not only the dozen that matter most."},
    )
    disable_dropout: Annotated[bool, SWITCH] = field(
        default=True,
        metadata={
            "help": "Set every dropout probability of the model, of its adapters and of the critic to 0 (TRL's "
            "default is False). With dropout, policy and old policy differ by its noise before any update."
        },
    )

    method_name = ""
    """What trackers log as `method`: the trainer says it."""

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | ({"method": self.method_name} if self.method_name else {})

    def __post_init__(self) -> None:
        check_fields(self, inherited=OF_TRL)
        if self.loss_type in TRLS_LOSS_TYPES:
            self._check_trls_loss()
        if self.clip_range_scaling == "length" and self.turn_ratio == "arithmetic":
            raise ValueError(
                "`clip_range_scaling` is 'length', but that is for geometric means: with `turn_ratio='arithmetic'` "
                "set 'sqrt_length'."
            )
        super().__post_init__()

    def _check_trls_loss(self) -> None:
        of_type = f"`loss_type` is {self.loss_type!r}, which TRL computes"
        if self.clip_range_scaling != "none":
            raise ValueError(f"{of_type} with its own range: set `clip_range_scaling='none'`.")
        is_weighted = self.use_vllm and self.vllm_importance_sampling_correction
        if self.async_staleness and self.async_old_policy == "proximal" and not is_weighted:
            raise ValueError(f"{of_type} without the weights of `async_old_policy='proximal'`: take 'behaviour'.")
        if self.bias_norm:
            raise ValueError(f"{of_type}, and `bias_norm` needs a loss of this package: set it to False.")

    @property
    def updates_per_rollout(self) -> float:
        """Optimizer steps on one rollout."""
        return int(self.num_iterations) * int(self.steps_per_generation or 1) / int(self.gradient_accumulation_steps)

    @property
    def compares_with_sampler(self) -> bool:
        """Whether ratios compare with what sampled, some updates ago, rather than with the policy of a pass."""
        return self.async_staleness > 0 and self.async_old_policy == "behaviour"

    @property
    def is_on_policy(self) -> bool:
        """Whether every update trains on what the policy has just sampled, so that every ratio is 1.

        It is TRL's criterion for doing without old log-probabilities.
        """
        micro_batches = int(self.num_iterations) * int(self.steps_per_generation or 1)
        return self.async_staleness == 0 and int(self.gradient_accumulation_steps) % micro_batches == 0


@dataclass
class SOGRPOConfig(TurnLevelConfig):
    """Configuration of [`SOGRPOTrainer`]: [`TurnLevelConfig`], whose defaults train SO-GRPO.

    Turn-level importance ratios (geometric mean) and, by the trainer's default method, the clipping-triggered penalty
    are SORL's; `target_kl` stands beside them as our safeguard.
    """
