"""What every turn-level trainer has in common with the others and adds to TRL's `GRPOConfig`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from trl import GRPOConfig

from sorl_trl.caller_warnings import warnings_at_the_caller
from sorl_trl.checks import (
    COUNT,
    NOT_NEGATIVE,
    SHARE,
    SWITCH,
    OneOf,
    Problem,
    field_problems,
    raise_first,
)
from sorl_trl.ops import (
    CLIP_RANGE_SCALINGS,
    IMPORTANCE_SAMPLING_LEVELS,
    KL_ESTIMATORS,
    PENALTY_GATES,
    TURN_RATIOS,
)
from sorl_trl.trainers.config_docs import documented
from sorl_trl.trainers.config_rules import ALLOWED_OF_TRL, LOSSES_WITHOUT_MIN, turn_level_problems
from sorl_trl.trainers.options.credit import CreditOptions
from sorl_trl.trainers.options.credit_rules import credit_problems
from sorl_trl.trainers.options.group_rules import group_option_problems
from sorl_trl.trainers.options.groups import GroupOptions
from sorl_trl.trainers.options.loss import LossOptions
from sorl_trl.trainers.options.loss_rules import loss_problems

TURN_LOSS_TYPE = "turn"
MINIRL_LOSS_TYPE = "minirl"
AGGREGATED_AS = {TURN_LOSS_TYPE: "grpo", MINIRL_LOSS_TYPE: "dr_grpo"}
"""Our loss types -> TRL's, which is to take the mean of our surrogate."""
LOSS_TYPES = (*AGGREGATED_AS, "grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
CLIP_NORMALIZATIONS = ("kl_penalty", "bias_norm", "none")
TURN_BOUNDARIES = ("recorded", "tags")
LOSSES_OF_TOKENS = (*LOSSES_WITHOUT_MIN, MINIRL_LOSS_TYPE)
"""Loss types whose ratios are of tokens where no level is set: ranges of sequences are no part of them."""
_SCALING_OF_LEVEL = {None: "length", "token": "none", "turn": "sqrt_length", "sequence": "none"}
"""What `clip_range_scaling` stands for where it is not set, by `importance_sampling_level`."""


@documented
@dataclass
class TurnLevelConfig(LossOptions, GroupOptions, CreditOptions, GRPOConfig):
    """`trl.GRPOConfig` plus the switches of SORL (arXiv 2511.20718, as specified in docs/paper_to_code.md), and ours.

    The defaults are what held best in the benchmark (docs/results.md), and no part of SORL: sequence ratios, whose
    clip range narrows as sequences grow longer (`clip_range_scaling`), and a learning rate that follows the KL
    (`target_kl`). SORL as specified in the note is `importance_sampling_level="turn", turn_ratio="arithmetic",
    clip_range_scaling="none", loss_type="turn", clip_normalization="kl_penalty", target_kl=0`.

    Every other parameter is TRL's, with TRL's meaning and default; docs/options.md has them all. With
    `importance_sampling_level="token"`, `clip_normalization="none"`, `target_kl=0` and one of TRL's loss types,
    training is TRL's to within 1e-6; `disable_dropout` must be equal too.
    """

    keeps_old_policy: ClassVar[bool] = True
    """Whether all iterations over a rollout compare with the policy that it was made with."""

    loss_type: Annotated[str, OneOf(LOSS_TYPES)] = field(
        default="grpo",
        metadata={
            "help": "How per-token losses are aggregated. 'turn': mean over the tokens of each turn, then over the "
            "turns of each trajectory, then over trajectories (the SO-PPO objective). Also every loss type of TRL, "
            "with TRL's meaning: 'grpo' (default), 'dr_grpo', 'dapo', 'bnpo', 'cispo', 'sapo', 'luspo', 'vespo' "
            "(which weighs whole sequences by itself, whatever `importance_sampling_level` says). 'minirl': MiniRL's "
            "objective (arXiv 2512.01374), a policy gradient weighted by policy over sampling policy up to "
            "`minirl_cap`, 0 where PPO would clip, summed over tokens as 'dr_grpo' sums them (divided by "
            "`max_completion_length` and averaged over trajectories)."
        },
    )
    importance_sampling_level: Annotated[str | None, OneOf(IMPORTANCE_SAMPLING_LEVELS)] = field(
        default=None,
        metadata={
            "help": "The unit that shares one importance ratio: 'token'; 'turn', as in SORL; or 'sequence', as in "
            "GSPO, where turns with advantages of their own keep them (GSPO-token). Unset, it is 'sequence', with a "
            "clip range that narrows (`clip_range_scaling`), and 'token' where the loss type clips no ratio "
            "('cispo', 'sapo', 'vespo') or is defined by tokens ('minirl'). With 'sapo', 'sequence' is TRL's: all "
            "turns of a trajectory are moved by the mean of their advantages."
        },
    )
    turn_ratio: Annotated[str, OneOf(TURN_RATIOS)] = field(
        default="geometric",
        metadata={
            "help": "How the token ratios of a turn become one. 'geometric' (default): exp of their mean logarithm, "
            "GSPO's length normalization applied per turn. 'arithmetic': their mean."
        },
    )
    clip_range_scaling: Annotated[str | None, OneOf(CLIP_RANGE_SCALINGS)] = field(
        default=None,
        metadata={
            "help": "Ours, no part of SORL: how the clip range narrows as the turn (or the sequence, at that level) "
            "grows longer, so that `epsilon`, `epsilon_high` and the distance of `delta` from 1 are those of a single "
            "token. 'none': it does not; 'sqrt_length': divided by the square root of the unit's tokens; 'length': by "
            "their number, up to 500, for geometric means alone. Unset, it is 'length' where "
            "`importance_sampling_level` is unset too, 'sqrt_length' where that is 'turn', and 'none' at the levels "
            "of TRL's, as in TRL, and where the loss type clips no ratio ('cispo', 'sapo', 'vespo') or is defined by "
            "tokens ('minirl')."
        },
    )
    clip_normalization: Annotated[str, OneOf(CLIP_NORMALIZATIONS)] = field(
        default="none",
        metadata={
            "help": "Clipping-triggered normalization of SORL. 'none' (default): off; beside `target_kl` the penalty "
            "was seen to cost exact match and to gain none (docs/results.md). 'kl_penalty': "
            "adds `ctn_coef` times the mean over trajectories of (share of tokens outside the clip range) x (KL to "
            "the old policy). 'bias_norm': divides the gradient of each optimizer step by max(1, L2 norm of the "
            "clipping bias), the gradient of the mean over trajectories of (sum of ratio x advantage over "
            "clipped tokens / tokens); not with DeepSpeed, FSDP, reentrant gradient checkpointing, or a loss "
            "without PPO's min."
        },
    )
    ctn_coef: Annotated[float, NOT_NEGATIVE] = field(
        default=3.0,
        metadata={"help": "Coefficient (λ >= 0) of the penalty of `clip_normalization='kl_penalty'`."},
    )
    kl_estimator: Annotated[str, OneOf(KL_ESTIMATORS)] = field(
        default="unbiased",
        metadata={
            "help": "Estimator of KL(policy || old policy) in the penalty; l is a token's log-ratio, w = exp(l): "
            "'unbiased' (default) w*l - w + 1, 'k1' l, 'k2' l*l/2, 'k3' exp(-l) - 1 + l."
        },
    )
    ctn_gate: Annotated[str, OneOf(PENALTY_GATES)] = field(
        default="token",
        metadata={
            "help": "What weighs the KL of each trajectory in the penalty. 'token' (default): the share of its tokens "
            "outside the gate's range; 'turn': the share of its turns; 'none': nothing, a plain KL penalty towards "
            "the old policy."
        },
    )
    ctn_epsilon: Annotated[float | None, NOT_NEGATIVE] = field(
        default=None,
        metadata={
            "help": "How far a ratio may fall below 1, and rise above it unless `ctn_epsilon_high` is set, before "
            "`ctn_gate` counts it. Unset, the gate reads the clip range (`epsilon`, `epsilon_high`), as the note has "
            "it; set, gate and clipping no longer move together."
        },
    )
    ctn_epsilon_high: Annotated[float | None, NOT_NEGATIVE] = field(
        default=None,
        metadata={"help": "How far a ratio may rise above 1 before `ctn_gate` counts it. Default: `ctn_epsilon`."},
    )
    target_kl: Annotated[float, NOT_NEGATIVE] = field(
        default=0.005,
        metadata={
            "help": "Ours, no part of SORL: KL to the old policy (`kl_to_old`, nats per token) near which the "
            "policy's learning rate is to hold it. An update that finds more than twice as much divides the learning "
            "rate by 1.5, one that finds less than half as much multiplies it by 1.5; it stays between 1/100 of the "
            "scheduled one and the scheduled one. 0: as scheduled."
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
            "of the policy that sampled it: what an asynchronous trainer does, at a fixed lag. That many rollouts are "
            "kept in memory and in checkpoints."
        },
    )
    save_trajectories_steps: Annotated[int, COUNT] = field(
        default=0,
        metadata={
            "help": "Every how many optimizer steps to write the trajectories that the step trains on, with ratio, "
            "advantage and clip state of every token, to `<output_dir>/trajectories`: `python -m "
            "sorl_trl.evaluation.view <output_dir> -o page.html` shows them. 0 (default): never."
        },
    )
    disable_dropout: Annotated[bool, SWITCH] = field(
        default=True,
        metadata={
            "help": "Set every dropout probability of the model, of its adapters and of the critic to 0 (TRL's "
            "default is False). With dropout, policy and old policy differ by its noise before any update: importance "
            "ratios, clipping and the KL to the old policy then measure that noise."
        },
    )
    turn_boundary: Annotated[str, OneOf(TURN_BOUNDARIES)] = field(
        default="recorded",
        metadata={
            "help": "What is a turn. 'recorded' (default): the spans that the rollout recorded (`turn_ids`), else "
            "each run of model tokens between observations. 'tags': in addition, a turn is split after each of "
            "`turn_boundary_tags`."
        },
    )
    turn_boundary_tags: list[str] = field(
        default_factory=lambda: ["</think>"],
        metadata={"help": "The closing tags after which `turn_boundary='tags'` starts a new turn."},
    )

    def problems(self) -> Iterator[Problem]:
        """Everything that is wrong with its values as they were given, but for what TRL itself refuses."""
        yield from field_problems(self, inherited=ALLOWED_OF_TRL)
        yield from turn_level_problems(self)
        yield from group_option_problems(self)
        yield from loss_problems(self)
        yield from credit_problems(self)

    def __post_init__(self) -> None:
        raise_first(self.problems())
        self._post_init_of_trl()

    @property
    def ratio_level(self) -> str:
        """`importance_sampling_level`; what it stands for where it is not set."""
        if self.importance_sampling_level is not None:
            return self.importance_sampling_level
        return "token" if self.loss_type in LOSSES_OF_TOKENS else "sequence"

    @property
    def clip_range_scaling_in_use(self) -> str:
        """`clip_range_scaling`; what it stands for where it is not set."""
        if self.clip_range_scaling is not None:
            return self.clip_range_scaling
        if self.loss_type in LOSSES_WITHOUT_MIN:
            return "none"
        of_tokens = self.ratio_level == "token"
        return _SCALING_OF_LEVEL["token" if of_tokens else self.importance_sampling_level]

    def to_dict(self) -> dict[str, Any]:
        """Its fields as trackers and logs show them, with the level and the scaling that are in use."""
        in_use = {
            "importance_sampling_level": self.ratio_level,
            "clip_range_scaling": self.clip_range_scaling_in_use,
        }
        return {**super().to_dict(), **in_use}

    def _post_init_of_trl(self) -> None:
        with warnings_at_the_caller():
            super().__post_init__()
