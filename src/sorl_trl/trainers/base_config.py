"""What every turn-level trainer has in common with the others and adds to TRL's `GRPOConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from sorl_trl.caller_warnings import warnings_at_the_caller
from sorl_trl.ops import IMPORTANCE_SAMPLING_LEVELS, KL_ESTIMATORS, PENALTY_GATES, TURN_RATIOS

TURN_LOSS_TYPE = "turn"
LOSS_TYPES = (TURN_LOSS_TYPE, "grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
LOSSES_WITHOUT_MIN = ("cispo", "sapo", "vespo")
"""Loss types that do not drop a token's gradient as PPO's min does."""
CLIP_NORMALIZATIONS = ("kl_penalty", "bias_norm", "none")
TURN_BOUNDARIES = ("recorded", "tags")
CLIP_RANGE = 0.2
"""TRL's `epsilon`, on both sides."""
TURN_CLIP_RANGE = (0.05, 0.2)
"""How far a turn's ratio may fall below and rise above 1: ours, measured in benchmarks/results/stability.md."""


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` is {value!r}, but must be one of {', '.join(map(repr, allowed))}.")


def check_number(name: str, value: Any, most: float | None = None, whole: bool = False) -> None:
    """Raise ValueError unless `value` is a finite number of at least 0, at most `most`, and whole if asked for."""
    allowed = f"in [0, {most:g}]" if most is not None else "a whole number, at least 0" if whole else "at least 0"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
    if not is_number or (whole and value != int(value)) or (most is not None and value > most):
        raise ValueError(f"`{name}` is {value!r}, but must be {'' if most or whole else 'finite and '}{allowed}.")


@dataclass
class TurnLevelConfig(GRPOConfig):
    """`trl.GRPOConfig` plus the switches of SORL (arXiv 2511.20718, as specified in docs/paper_to_code.md), and ours.

    Ours, and no part of SORL, are `target_kl` and the narrow lower clip range of turns (`epsilon`). SORL as specified
    in the note is `turn_ratio="arithmetic", epsilon=0.2, target_kl=0`.

    Parameters:
        loss_type (`str`, defaults to `"turn"`):
            How per-token losses are aggregated: by turns, or as one of TRL's loss types does.
        importance_sampling_level (`str`, defaults to `"turn"`):
            The unit that shares an importance ratio: `"token"`, `"turn"` or `"sequence"`.
        turn_ratio (`str`, defaults to `"geometric"`):
            How a turn's token ratios become one: `"geometric"` or `"arithmetic"` mean.
        epsilon (`float`, *optional*):
            How far a ratio may fall below 1, and rise above it unless `epsilon_high` is set, before it is clipped.
            Unset, it is 0.05 below and 0.2 above where turns share a ratio (ours), and TRL's 0.2 elsewhere.
        clip_normalization (`str`, defaults to `"kl_penalty"`):
            Clipping-triggered normalization: `"kl_penalty"`, `"bias_norm"` or `"none"`.
        ctn_coef (`float`, defaults to `3.0`):
            Coefficient λ of the KL penalty.
        kl_estimator (`str`, defaults to `"unbiased"`):
            Estimator of the KL in the penalty: `"unbiased"`, `"k1"`, `"k2"` or `"k3"`.
        ctn_gate (`str`, defaults to `"token"`):
            What each trajectory's penalty is weighted by: its share of `"token"`s or `"turn"`s outside the gate's
            range, or `"none"`.
        ctn_epsilon (`float`, *optional*):
            How far a ratio may fall below 1, and rise above it unless `ctn_epsilon_high` is set, before the gate
            counts it; unset, as far as the clip range lets it.
        ctn_epsilon_high (`float`, *optional*):
            How far a ratio may rise above 1 before the gate counts it.
        target_kl (`float`, defaults to `0.005`):
            KL to the old policy near which the policy's learning rate is to hold it (ours); 0 leaves it as scheduled.
        gamma (`float`, defaults to `1.0`):
            Discount per turn.
        rollout_staleness (`int`, defaults to `0`):
            How many rollouts late each rollout is trained on.
        save_trajectories_steps (`int`, defaults to `0`):
            Every how many steps to write down what they train on, for `sorl_trl.evaluation.view`; 0 for never.
        disable_dropout (`bool`, defaults to `True`):
            Whether dropout is off in training, for whose noise importance ratios would differ from 1 (TRL: `False`).
        turn_boundary (`str`, defaults to `"recorded"`):
            `"recorded"` spans (else runs of model tokens), or split after closing `"tags"` in addition.
        turn_boundary_tags (`list[str]`, defaults to `["</think>"]`):
            Those closing tags.

    Every other parameter is TRL's, with TRL's meaning and default; docs/options.md has them all. With
    `importance_sampling_level="token"`, `clip_normalization="none"`, `target_kl=0` and one of TRL's loss types,
    training is TRL's to within 1e-6; `disable_dropout` must be equal too.
    """

    loss_type: str = field(
        default=TURN_LOSS_TYPE,
        metadata={
            "help": "How per-token losses are aggregated. 'turn' (default): mean over the tokens of each turn, then "
            "over the turns of each trajectory, then over trajectories (the SO-PPO objective). Also every loss type "
            "of TRL, with TRL's meaning: 'grpo', 'dr_grpo', 'dapo', 'bnpo', 'cispo', 'sapo', 'luspo', 'vespo' (which "
            "weighs whole sequences by itself, whatever `importance_sampling_level` says)."
        },
    )
    importance_sampling_level: str = field(
        default="turn",
        metadata={
            "help": "The unit that shares one importance ratio: 'token', 'turn' (default) or 'sequence' (as in GSPO)."
        },
    )
    turn_ratio: str = field(
        default="geometric",
        metadata={
            "help": "How the token ratios of a turn become one. 'geometric' (default): exp of their mean logarithm, "
            "GSPO's length normalization applied per turn. 'arithmetic': their mean."
        },
    )
    epsilon: float | None = field(
        default=None,
        metadata={
            "help": "How far a ratio may fall below 1, and rise above it unless `epsilon_high` is set, before it is "
            "clipped. Unset, it is 0.05 below and 0.2 above with `importance_sampling_level='turn'`, whose ratios "
            "average over tokens and leave a wide range late (the narrow lower range is ours, no part of SORL); TRL's "
            "0.2 at the other levels."
        },
    )
    clip_normalization: str = field(
        default="kl_penalty",
        metadata={
            "help": "Clipping-triggered normalization. 'kl_penalty' (default): adds `ctn_coef` times the mean over "
            "trajectories of (share of tokens outside the clip range) x (KL to the old policy). 'bias_norm': divides "
            "the gradient of each optimizer step by max(1, L2 norm of the clipping bias), the gradient of the mean "
            "over trajectories of (sum of ratio x advantage over clipped tokens / tokens); not with DeepSpeed, FSDP, "
            "reentrant gradient checkpointing, or a loss without PPO's min. 'none': off."
        },
    )
    ctn_coef: float = field(
        default=3.0,
        metadata={"help": "Coefficient (λ >= 0) of the penalty of `clip_normalization='kl_penalty'`."},
    )
    kl_estimator: str = field(
        default="unbiased",
        metadata={
            "help": "Estimator of KL(policy || old policy) in the penalty; l is a token's log-ratio, w = exp(l): "
            "'unbiased' (default) w*l - w + 1, 'k1' l, 'k2' l*l/2, 'k3' exp(-l) - 1 + l."
        },
    )
    ctn_gate: str = field(
        default="token",
        metadata={
            "help": "What weighs the KL of each trajectory in the penalty. 'token' (default): the share of its tokens "
            "outside the gate's range; 'turn': the share of its turns; 'none': nothing, a plain KL penalty towards "
            "the old policy."
        },
    )
    ctn_epsilon: float | None = field(
        default=None,
        metadata={
            "help": "How far a ratio may fall below 1, and rise above it unless `ctn_epsilon_high` is set, before "
            "`ctn_gate` counts it. Unset, the gate reads the clip range (`epsilon`, `epsilon_high`), as the note has "
            "it; set, gate and clipping no longer move together."
        },
    )
    ctn_epsilon_high: float | None = field(
        default=None,
        metadata={"help": "How far a ratio may rise above 1 before `ctn_gate` counts it. Default: `ctn_epsilon`."},
    )
    target_kl: float = field(
        default=0.005,
        metadata={
            "help": "Ours, no part of SORL: KL to the old policy (`kl_to_old`, nats per token) near which the "
            "policy's learning rate is to hold it. An update that finds more than twice as much divides the learning "
            "rate by 1.5, one that finds less than half as much multiplies it by 1.5; it stays between 1/100 of the "
            "scheduled one and the scheduled one. 0: as scheduled."
        },
    )
    gamma: float = field(
        default=1.0,
        metadata={"help": "Discount per turn, in [0, 1]: a reward k turns later counts gamma**k."},
    )
    rollout_staleness: int = field(
        default=0,
        metadata={
            "help": "How many rollouts late each rollout is trained on (0: at once), with the old log-probabilities "
            "of the policy that sampled it: what an asynchronous trainer does, at a fixed lag. That many rollouts are "
            "kept in memory and in checkpoints."
        },
    )
    save_trajectories_steps: int = field(
        default=0,
        metadata={
            "help": "Every how many optimizer steps to write the trajectories that the step trains on, with ratio, "
            "advantage and clip state of every token, to `<output_dir>/trajectories`: `python -m "
            "sorl_trl.evaluation.view <output_dir> -o page.html` shows them. 0 (default): never."
        },
    )
    disable_dropout: bool = field(
        default=True,
        metadata={
            "help": "Set every dropout probability of the model, of its adapters and of the critic to 0 (TRL's "
            "default is False). With dropout, policy and old policy differ by its noise before any update: importance "
            "ratios, clipping and the KL to the old policy then measure that noise."
        },
    )
    turn_boundary: str = field(
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

    def __post_init__(self) -> None:
        with warnings_at_the_caller():
            super().__post_init__()
        check_choice("loss_type", self.loss_type, LOSS_TYPES)
        check_choice("importance_sampling_level", self.importance_sampling_level, IMPORTANCE_SAMPLING_LEVELS)
        check_choice("turn_ratio", self.turn_ratio, TURN_RATIOS)
        check_choice("clip_normalization", self.clip_normalization, CLIP_NORMALIZATIONS)
        check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check_choice("ctn_gate", self.ctn_gate, PENALTY_GATES)
        check_choice("turn_boundary", self.turn_boundary, TURN_BOUNDARIES)
        self._set_clip_range()
        self._set_gate_range()
        check_number("ctn_coef", self.ctn_coef)
        check_number("target_kl", self.target_kl)
        check_number("rollout_staleness", self.rollout_staleness, whole=True)
        check_number("save_trajectories_steps", self.save_trajectories_steps, whole=True)
        check_number("gamma", self.gamma, most=1.0)
        tags = self.turn_boundary_tags
        if isinstance(tags, str) or (self.turn_boundary == "tags" and not (tags and all(tags))):
            raise ValueError(
                f"`turn_boundary_tags` is {tags!r}, but `turn_boundary='tags'` needs a list of tags, none empty."
            )
        if self.clip_normalization == "bias_norm":
            self._check_bias_norm()

    def _check_bias_norm(self) -> None:
        if self.loss_type in LOSSES_WITHOUT_MIN:
            raise ValueError(
                f"`clip_normalization='bias_norm'` is about what PPO's min removes; `loss_type={self.loss_type!r}` "
                "has none. Use `clip_normalization='kl_penalty'` or 'none', or another loss type."
            )
        if (self.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "`clip_normalization='bias_norm'` takes a gradient of its own, which reentrant gradient checkpointing "
                "cannot give. Set `gradient_checkpointing_kwargs={'use_reentrant': False}`, or "
                "`clip_normalization='kl_penalty'`."
            )
        for name, off in (("top_entropy_quantile", 1.0), ("off_policy_mask_threshold", None)):
            if getattr(self, name) != off:
                raise ValueError(
                    f"`{name}` is {getattr(self, name)}, which leaves tokens out of the loss that "
                    "`clip_normalization='bias_norm'` would count as clipped. "
                    f"Set `{name}={off}`, or `clip_normalization='kl_penalty'`."
                )

    def _set_gate_range(self) -> None:
        for name in ("ctn_epsilon", "ctn_epsilon_high"):
            value = getattr(self, name)
            if value is None:
                continue
            check_number(name, value)
            if self.clip_normalization != "kl_penalty" or self.ctn_gate == "none":
                raise ValueError(
                    f"`{name}` is {value}, but nothing reads it with `clip_normalization={self.clip_normalization!r}` "
                    f"and `ctn_gate={self.ctn_gate!r}`: it is the range of the penalty's gate."
                )
        if self.ctn_epsilon_high is None:
            self.ctn_epsilon_high = self.ctn_epsilon

    def _set_clip_range(self) -> None:
        given: float | None = vars(self)["epsilon_high"]
        if self.loss_type == "cispo" and given is None:
            raise ValueError(
                "`epsilon_high` is not set, but with `loss_type='cispo'` it is the cap on the ratio itself, and TRL's "
                "fallback to `epsilon` would cap every weight far below 1. Set `epsilon_high=5.0`, as TRL recommends."
            )
        for name in ("epsilon", "epsilon_high"):
            if vars(self)[name] is not None:
                check_number(name, vars(self)[name])
        if self.epsilon is not None:
            return
        self.epsilon = CLIP_RANGE
        if self.importance_sampling_level == "turn":
            self.epsilon = TURN_CLIP_RANGE[0]
            self.epsilon_high = TURN_CLIP_RANGE[1] if given is None else given
