"""Settings of the method that each may have, and that do not go together."""

from __future__ import annotations

from collections.abc import Iterator
from math import log

from sorl_trl.doctor.findings import Finding
from sorl_trl.doctor.subject import Subject, given
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.checks.inert import inert_warning, suggested_iterations, updates_per_rollout
from sorl_trl.trainers.checks.options import idle_options, search_rollout_problems
from sorl_trl.trainers.checks.training_noise import noise_warning
from sorl_trl.trainers.so_ppo_config import SOPPOConfig

MANY_UPDATES = 16
"""Of one rollout. Ours: 8 were seen to hold without any cure and 32 to collapse (benchmarks/results/stability.md)."""


def check_batches(subject: Subject) -> Iterator[Finding]:
    """Whether the questions fill a rollout; that batches hold whole groups was checked when they were read."""
    config = _config(subject)
    size = int(config.generation_batch_size or 0)
    prompts = size // int(config.num_generations or 1)
    given(subject.questions, "questions")
    if subject.questions_in_all < prompts:
        what = f"a rollout takes {prompts} questions, but there are {subject.questions_in_all}"
        yield Finding("error", what, subject.recipe.line("train_questions"))
    shown = f"{size} trajectories per rollout: {prompts} questions x {config.num_generations}"
    yield Finding("ok", f"{shown}, {updates_per_rollout(config):g} updates each, processes: {subject.num_processes}")


def check_vllm(subject: Subject) -> Iterator[Finding]:
    """Whether long trajectories survive the correction of vLLM's log-probabilities."""
    config = _config(subject)
    mode, limits = config.vllm_importance_sampling_mode, _ratio_limits(config)
    if not config.use_vllm or not config.vllm_importance_sampling_correction:
        yield Finding("ok", "no correction of vLLM's log-probabilities")
    elif mode.startswith("sequence") and limits:
        tokens = subject.max_completion_length
        nearest = min(abs(log(limit)) for limit in limits.values()) / tokens
        fate = "weight 0" if mode == "sequence_mask" else "that limit for a weight"
        what = f"`vllm_importance_sampling_mode` {mode!r} multiplies the ratios of all tokens of a trajectory: one of "
        what += f"{tokens} tokens that differ by {nearest:.1g} nats in the mean is beyond "
        what += f"{' or '.join(f'{name} {limit}' for name, limit in limits.items())} and gets {fate}"
        yield Finding("warning", what, subject.recipe.line("vllm_importance_sampling_mode", "token_truncate"))
    else:
        yield Finding("ok", f"vLLM's log-probabilities are corrected by {mode}")


def _ratio_limits(config: TurnLevelConfig) -> dict[str, float]:
    """Name -> limit of the importance ratio, of those that are set."""
    names = ("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max")
    return {name: float(getattr(config, name)) for name in names if (getattr(config, name) or 0) > 0}


def check_method(subject: Subject) -> Iterator[Finding]:
    """Few rules, each with something that was seen or that the code refuses later."""
    config, line = _config(subject), subject.recipe.line
    if config.clip_normalization == "none" and not config.target_kl and updates_per_rollout(config) >= MANY_UPDATES:
        what = f"{updates_per_rollout(config):g} updates per rollout without `target_kl` and `clip_normalization`: "
        what += "with 32 most runs collapsed (docs/stability.md)"
        yield Finding("warning", what, line("target_kl", TurnLevelConfig.target_kl))
    if config.clip_normalization == "kl_penalty" and config.ctn_coef == 0:
        what = "`clip_normalization` is 'kl_penalty', but `ctn_coef`, its coefficient, is 0"
        yield Finding("warning", what, line("ctn_coef", TurnLevelConfig.ctn_coef))
    weights, rewards = config.reward_weights, subject.raw.rewards
    if weights is not None and len(weights) != len(rewards):
        yield Finding(
            "error", f"`reward_weights` has {len(weights)} for {len(rewards)} rewards", line("reward_weights")
        )
    inert = inert_warning(config)
    if inert is not None:
        yield Finding("warning", inert, line("num_iterations", suggested_iterations(config)))
    yield from _check_noise(subject, config)
    yield from _check_guard(subject, config)
    yield from _check_critic(subject, config)
    yield Finding("ok", f"{subject.raw.trainer}, {config.loss_type} loss, {config.importance_sampling_level} ratios")


def check_options(subject: Subject) -> Iterator[Finding]:
    """Options that the rollout of `train.py` cannot honour, and those that are read nowhere."""
    config, line = _config(subject), subject.recipe.line
    problems = [*search_rollout_problems(config)]
    idle = [*idle_options(config)]
    yield from (Finding("error", each.what, line(each.option)) for each in problems)
    yield from (Finding("warning", each.what, line(each.option)) for each in idle)
    if not problems and not idle:
        yield Finding("ok", "no option is refused, and none is without effect")


def _check_noise(subject: Subject, config: TurnLevelConfig) -> Iterator[Finding]:
    """Dropout of the adapter and of the model's configuration; without its weights no more of it can be seen."""
    if config.neftune_noise_alpha:
        noise = [f"neftune_noise_alpha={config.neftune_noise_alpha:g} (the embeddings)"]
        yield Finding("warning", noise_warning(noise, True), subject.recipe.line("neftune_noise_alpha"))
    if config.disable_dropout:
        return
    noise = [f"{name}={value:g} (the model's configuration)" for name, value in subject.config_noise.items()]
    if subject.raw.use_peft and subject.raw.lora_dropout:
        noise.append(f"lora_dropout={subject.raw.lora_dropout:g}")
    if noise:
        yield Finding("warning", noise_warning(noise, False), subject.recipe.line("disable_dropout", True))


def _check_guard(subject: Subject, config: TurnLevelConfig) -> Iterator[Finding]:
    """What `CollapseGuard` refuses once the model is loaded."""
    action, line = subject.raw.collapse_guard, subject.recipe.line
    if action != "off" and config.logging_strategy == "no":
        yield Finding(
            "error",
            "`collapse_guard` reads the log, but `logging_strategy` is 'no'",
            line("logging_strategy", "steps"),
        )
    if action != "off" and config.logging_strategy == "steps" and config.logging_steps != 1:
        what = (
            f"`collapse_guard` reads the log, but `logging_steps` is {config.logging_steps:g}: it learns of numbers "
        )
        yield Finding("warning", f"{what}that are not finite so late", line("logging_steps", 1))
    if action == "roll_back" and config.save_strategy == "no":
        what = "`collapse_guard` is to roll back to a checkpoint, but `save_strategy` is 'no'"
        yield Finding("error", what, line("save_strategy", "steps"))
    if action == "roll_back" and config.save_only_model:
        what = "`collapse_guard` is to roll back the optimizer too, but `save_only_model` is true"
        yield Finding("error", what, line("save_only_model", False))


def _check_critic(subject: Subject, config: TurnLevelConfig) -> Iterator[Finding]:
    """What the critic's construction refuses once the model is loaded."""
    if not isinstance(config, SOPPOConfig):
        return
    if config.critic == "adapter" and not subject.raw.use_peft:
        yield Finding("error", "`critic` is 'adapter', but `use_peft` is false", subject.recipe.line("critic", "head"))
    if config.critic is None and config.critic_trunk_gradient and subject.raw.use_peft:
        what = "`critic_trunk_gradient` is for a head, but with `use_peft` the critic is an adapter"
        yield Finding("error", what, subject.recipe.line("critic_trunk_gradient", False))


def _config(subject: Subject) -> TurnLevelConfig:
    return given(subject.arguments.config, "the trainer's config")
