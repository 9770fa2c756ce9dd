"""Whether a configuration ever trains on trajectories that an older policy sampled."""

from __future__ import annotations

from math import ceil

from sorl_trl.trainers.base_config import TurnLevelConfig

SUGGESTED_UPDATES = 4
"""Of one rollout, in the advice. Ours: 8 held at a moderate learning rate (benchmarks/results/stability.md)."""


def updates_per_rollout(config: TurnLevelConfig) -> float:
    """Optimizer steps on one rollout."""
    return _micro_batches(config) / int(config.gradient_accumulation_steps)


def is_on_policy(config: TurnLevelConfig) -> bool:
    """Whether every update trains on what the policy has just sampled, so that every importance ratio is 1.

    It is TRL's own criterion for doing without old log-probabilities: whole rollouts end where an update does, or,
    where each iteration compares with the policy from before it, whole iterations. vLLM changes nothing about it: the
    old log-probabilities are the trainer's own.
    """
    compared = _micro_batches(config) if config.keeps_old_policy else int(config.steps_per_generation or 1)
    return config.rollout_staleness == 0 and int(config.gradient_accumulation_steps) % compared == 0


def inert_settings(config: TurnLevelConfig) -> list[str]:
    """What is switched on and has no effect, as `name=value`: it acts on ratios, and every ratio is 1."""
    if not is_on_policy(config):
        return []
    penalty_counts = config.clip_normalization != "kl_penalty" or config.ctn_coef > 0
    switched_on = {
        f"importance_sampling_level={config.ratio_level!r}": config.ratio_level == "turn",
        f"clip_range_scaling={config.clip_range_scaling_in_use!r}": config.clip_range_scaling_in_use != "none",
        f"clip_normalization={config.clip_normalization!r}": config.clip_normalization != "none" and penalty_counts,
        f"double_sided_clip={config.double_sided_clip!r}": config.double_sided_clip,
        f"llds_coef={config.llds_coef!r}": config.llds_coef > 0,
        f"target_kl={config.target_kl!r}": config.target_kl > 0,
    }
    return [setting for setting, is_on in switched_on.items() if is_on]


def suggested_iterations(config: TurnLevelConfig) -> int:
    """`num_iterations` with which each rollout has `SUGGESTED_UPDATES` updates, or a few more."""
    return ceil(SUGGESTED_UPDATES * int(config.gradient_accumulation_steps) / int(config.steps_per_generation or 1))


def suggested_setting(config: TurnLevelConfig) -> tuple[str, int]:
    """The option to change, and a value with which settings that are inert have an effect."""
    if config.keeps_old_policy:
        return "num_iterations", suggested_iterations(config)
    return "steps_per_generation", SUGGESTED_UPDATES * int(config.gradient_accumulation_steps)


def inert_warning(config: TurnLevelConfig) -> str | None:
    """What to tell a user whose settings have no effect, and a setting to try; None where they have one."""
    settings = inert_settings(config)
    if not settings:
        return None
    accumulation = int(config.gradient_accumulation_steps)
    factors = f"`num_iterations` {config.num_iterations} x `steps_per_generation` {config.steps_per_generation}"
    updates = f"{updates_per_rollout(config):g} ({factors} / `gradient_accumulation_steps` {accumulation})"
    shown = " and ".join(f"`{setting}`" for setting in settings)
    if not config.keeps_old_policy:
        return (
            f"Updates per rollout: {updates}, one in each iteration, which compares with the policy from before it: "
            f"every importance ratio is 1, nothing is clipped, and {shown} {'have' if len(settings) > 1 else 'has'} "
            f"no effect. For {SUGGESTED_UPDATES} updates per iteration set "
            f"`steps_per_generation={SUGGESTED_UPDATES * accumulation}` (of smaller batches, or larger rollouts)."
        )
    return (
        f"Updates per rollout: {updates}. Each update trains on what the policy has just sampled: every importance "
        f"ratio is 1, nothing is clipped, and {shown} {'have' if len(settings) > 1 else 'has'} no effect. For "
        f"{SUGGESTED_UPDATES} updates per rollout set `steps_per_generation={SUGGESTED_UPDATES * accumulation}` "
        "(larger rollouts; in place of `generation_batch_size`) or "
        f"`num_iterations={suggested_iterations(config)}` (each rollout used again); or switch these settings off."
    )


def _micro_batches(config: TurnLevelConfig) -> int:
    """Into which one rollout is split, each counted as often as it is used."""
    return int(config.num_iterations) * int(config.steps_per_generation or 1)
