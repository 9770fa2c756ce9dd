"""What the options of `LossOptions` must be together, and with others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sorl_trl.checks import Problem
from sorl_trl.trainers.config_rules import LOSSES_WITHOUT_MIN, dropping_problems
from sorl_trl.trainers.options.loss import TURN_MODES

if TYPE_CHECKING:
    from sorl_trl.trainers.base_config import TurnLevelConfig


def loss_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    """What these options cannot be beside the others."""
    if config.double_sided_clip:
        yield from _double_sided_problems(config)
    if config.loss_type == "minirl":
        yield from _minirl_problems(config)
    if config.use_vllm and config.vllm_importance_sampling_correction:
        if config.mismatch_veto is not None:
            yield from dropping_problems(config, "mismatch_veto")
        elif config.vllm_importance_sampling_mode == "turn_mask":
            yield from dropping_problems(config, "vllm_importance_sampling_mode='turn_mask'")
        yield from _bound_problems(config)


def _bound_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    """As TRL asks it of its modes that truncate; without a bound, a mode of turns would neither mask nor truncate."""
    mode = config.vllm_importance_sampling_mode
    bounds = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    if mode in TURN_MODES and bounds == (None, None):
        yield Problem(
            "vllm_importance_sampling_clip_max",
            "`vllm_importance_sampling_clip_min` and `vllm_importance_sampling_clip_max` are None, but "
            f"`vllm_importance_sampling_mode={mode!r}` needs at least one of them.",
            2.0,
        )


def _double_sided_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    if config.loss_type in (*LOSSES_WITHOUT_MIN, "minirl"):
        yield Problem(
            "double_sided_clip",
            "`double_sided_clip` is True, but takes the place of PPO's min, and "
            f"`loss_type={config.loss_type!r}` has none. Set it to False, or use another loss type.",
            False,
        )
    if config.delta is not None:
        yield Problem(
            "delta",
            f"`delta` is {config.delta}, but bounds ratios above the clip range, of which `double_sided_clip` leaves "
            "none. Set `delta=None`, or `double_sided_clip=False`.",
            None,
        )
    if config.clip_normalization == "bias_norm":
        yield Problem(
            "clip_normalization",
            "`clip_normalization='bias_norm'` is about the tokens that PPO's min clips, and `double_sided_clip` "
            "clips others. Set `clip_normalization='none'`, or `double_sided_clip=False`.",
            "none",
        )


def _minirl_problems(config: TurnLevelConfig) -> Iterator[Problem]:
    why = "`loss_type='minirl'` drops a token where PPO would clip it, and weighs the others up to `minirl_cap`"
    if config.delta is not None:
        yield Problem("delta", f"`delta` is {config.delta}, but {why}. Set `delta=None`.", None)
    if config.clip_normalization == "bias_norm":
        text = f"`clip_normalization='bias_norm'` is about what PPO's min removes, but {why}. Set it to 'none'."
        yield Problem("clip_normalization", text, "none")
    if config.max_completion_length is None:
        yield Problem(
            "max_completion_length",
            "`max_completion_length` is None, but `loss_type='minirl'` divides the sum over tokens by it, as TRL's "
            "'dr_grpo' does. Set it.",
        )
