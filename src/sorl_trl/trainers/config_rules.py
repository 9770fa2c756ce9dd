"""What the options of a config must be together, a small rule each. What one must be by itself stands at its field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sorl_trl.checks import NOT_NEGATIVE, POSITIVE_COUNT, Allowed, Problem

if TYPE_CHECKING:
    from sorl_trl.trainers.base_config import TurnLevelConfig
    from sorl_trl.trainers.so_ppo_config import SOPPOConfig

LOSSES_WITHOUT_MIN = ("cispo", "sapo", "vespo")
"""Loss types that do not drop a token's gradient as PPO's min does."""
COUNTS = (
    *("num_generations", "num_generations_eval", "per_device_train_batch_size", "per_device_eval_batch_size"),
    *("steps_per_generation", "generation_batch_size", "gradient_accumulation_steps", "num_iterations"),
)
"""Of what makes up a batch. TRL divides by them."""
ALLOWED_OF_TRL: Mapping[str, Allowed] = {
    "epsilon": NOT_NEGATIVE,
    "epsilon_high": NOT_NEGATIVE,
    **dict.fromkeys(COUNTS, POSITIVE_COUNT),
}
"""Fields of TRL's, which takes any value for them, -> what they allow."""
SUM_THEN_NORMALIZE = "sum_then_normalize"


def turn_level_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    """What no turn-level trainer can do."""
    if config.loss_type == "cispo" and vars(config)["epsilon_high"] is None:
        yield Problem(
            "epsilon_high",
            "`epsilon_high` is not set, but with `loss_type='cispo'` it is the cap on the ratio itself, and TRL's "
            "fallback to `epsilon` would cap every weight far below 1. Set `epsilon_high=5.0`, as TRL recommends.",
            5.0,
        )
    yield from _gate_problems(config)
    if why := scaling_refusal(config, config.clip_range_scaling):
        yield Problem(
            "clip_range_scaling", f"`clip_range_scaling` is {config.clip_range_scaling!r}, but {why}", "none"
        )
    elif config.clip_range_scaling is None and (why := scaling_refusal(config, config.clip_range_scaling_in_use)):
        in_use = config.clip_range_scaling_in_use
        yield Problem(
            "clip_range_scaling",
            f"`clip_range_scaling` is not set and stands for {in_use!r}, which `ctn_gate='turn'` reads too, but {why}",
            "sqrt_length",
        )
    tags = config.turn_boundary_tags
    if isinstance(tags, str) or (config.turn_boundary == "tags" and not (tags and all(tags))):
        yield Problem(
            "turn_boundary_tags",
            f"`turn_boundary_tags` is {tags!r}, but `turn_boundary='tags'` needs a list of tags, none empty.",
        )
    if config.clip_normalization == "bias_norm":
        yield from _bias_norm_problems(config)


def scaling_refusal(config: TurnLevelConfig, scaling: str | None) -> str | None:
    """Why this `clip_range_scaling` would not do, as the end of a sentence; None where it does."""
    if scaling in (None, "none"):
        return None
    clips_units = config.ratio_level != "token" and config.loss_type not in LOSSES_WITHOUT_MIN
    counts_turns = config.clip_normalization == "kl_penalty" and config.ctn_gate == "turn" and config.ctn_coef > 0
    if not (clips_units or counts_turns):
        return (
            "nothing clips the ratio of a turn or a sequence with "
            f"`importance_sampling_level={config.ratio_level!r}` and `loss_type={config.loss_type!r}`, "
            "and no `ctn_gate='turn'` counts them. Set it to 'none'."
        )
    has_turn_ratios = counts_turns or config.ratio_level == "turn"
    if scaling == "length" and config.turn_ratio == "arithmetic" and has_turn_ratios:
        return (
            "that is for geometric means, which are roots of the turn's joint ratio. An arithmetic mean is not, and "
            "spreads by 1/sqrt(tokens) around 1: set 'sqrt_length', which is its law, or `turn_ratio='geometric'`."
        )
    return None


def _gate_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    if config.clip_normalization != "kl_penalty":
        why = f"`clip_normalization` is {config.clip_normalization!r}. Set `clip_normalization='kl_penalty'`"
    elif config.ctn_gate == "none":
        why = "`ctn_gate` is 'none'. Set `ctn_gate` to 'token' or 'turn'"
    else:
        return
    for name in ("ctn_epsilon", "ctn_epsilon_high"):
        if (value := getattr(config, name)) is not None:
            text = f"`{name}` is {value}, but nothing reads it: it is the range of the penalty's gate, and {why}, or "
            yield Problem(name, f"{text}leave `{name}` unset.")


def _bias_norm_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    if config.loss_type in LOSSES_WITHOUT_MIN:
        yield Problem(
            "clip_normalization",
            f"`clip_normalization='bias_norm'` is about what PPO's min removes; `loss_type={config.loss_type!r}` "
            "has none. Set it to 'none', or use another loss type.",
            "none",
        )
    if _is_reentrant(config.gradient_checkpointing_kwargs):
        yield Problem(
            "gradient_checkpointing_kwargs",
            "`clip_normalization='bias_norm'` takes a gradient of its own, which reentrant gradient checkpointing "
            "cannot give. Set `gradient_checkpointing_kwargs={'use_reentrant': False}`, or "
            "`clip_normalization='none'`.",
            {"use_reentrant": False},
        )
    for name, off in (("top_entropy_quantile", 1.0), ("off_policy_mask_threshold", None)):
        if getattr(config, name) != off:
            yield Problem(
                name,
                f"`{name}` is {getattr(config, name)}, which leaves tokens out of the loss that "
                "`clip_normalization='bias_norm'` would count as clipped. "
                f"Set `{name}={off}`, or `clip_normalization='none'`.",
                off,
            )


def _is_reentrant(options: Any) -> bool:
    """Of the keyword arguments of gradient checkpointing; a command line has them as JSON."""
    if isinstance(options, str):
        try:
            options = json.loads(options)
        except ValueError:  # transformers refuses it
            return False
    return isinstance(options, Mapping) and bool(options.get("use_reentrant"))


def dropping_problems(config: TurnLevelConfig, option: str) -> Iterator[Problem]:
    """What an `option` that takes trajectories out of the loss cannot do, once it is switched on."""
    if config.loss_type == "bnpo":
        yield Problem(
            "loss_type",
            f"`loss_type` is 'bnpo', but `{option}` takes trajectories out of the loss, and a micro-batch that has "
            "lost all of its own would be a 0 in the mean over micro-batches. Use 'dapo', whose mean is over the "
            "tokens of all of them.",
            "dapo",
        )


def group_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    """What SO-GRPO cannot do."""
    if config.gamma != 1.0 and config.multi_objective_aggregation != SUM_THEN_NORMALIZE:
        yield Problem(
            "multi_objective_aggregation",
            f"`multi_objective_aggregation` is {config.multi_objective_aggregation!r}, but `gamma` below 1 needs "
            "'sum_then_normalize'.",
            SUM_THEN_NORMALIZE,
        )


def critic_problems(config: SOPPOConfig) -> Iterator[Problem]:
    """What SO-PPO cannot do."""
    if config.kl_in_reward and config.beta == 0.0:
        yield Problem("beta", "`kl_in_reward` is set, but `beta`, the coefficient of that KL, is 0.0. Set `beta`.")
    if config.critic_trunk_gradient and config.critic in ("adapter", "model"):
        yield Problem(
            "critic_trunk_gradient",
            f"`critic_trunk_gradient` is set, but `critic={config.critic!r}` shares no trained weights with the "
            "policy. Use `critic='head'`, or leave it unset.",
            False,
        )
    if config.critic_trunk_gradient and config.clip_normalization == "bias_norm":
        yield Problem(
            "critic_trunk_gradient",
            "`clip_normalization='bias_norm'` divides the gradient of the policy's weights, and with "
            "`critic_trunk_gradient` the value loss is in it. Use one or the other.",
            False,
        )
    if config.multi_objective_aggregation != SUM_THEN_NORMALIZE:
        yield Problem(
            "multi_objective_aggregation",
            f"`multi_objective_aggregation` is {config.multi_objective_aggregation!r}, but the critic learns the "
            "weighted sum of the rewards: use 'sum_then_normalize'.",
            SUM_THEN_NORMALIZE,
        )


def adapter_problems(config: SOPPOConfig, has_peft: bool) -> Iterator[Problem]:
    """What a critic cannot be of a policy with PEFT, or without: known once there is a model, or `use_peft`."""
    if config.critic == "adapter" and not has_peft:
        yield Problem(
            "critic",
            "`critic='adapter'` needs a PEFT model: pass a `peft_config` (LoRA) to the trainer (`use_peft` in a "
            "recipe), or use `critic='head'` or `critic='model'`.",
            "head",
        )
    if config.critic is None and has_peft and config.critic_trunk_gradient:
        yield Problem(
            "critic_trunk_gradient",
            "`critic_trunk_gradient` is set, but is for `critic='head'`; with PEFT the default is 'adapter'.",
            False,
        )
