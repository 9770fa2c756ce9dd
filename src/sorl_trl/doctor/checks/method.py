"""Settings of the method that each may have, and that do not go together."""

from __future__ import annotations

from collections.abc import Iterator
from math import log

from sorl_trl.doctor.findings import Finding
from sorl_trl.doctor.subject import Subject, given
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.checks.dataset import dataset_size_problems
from sorl_trl.trainers.checks.inert import inert_warning, suggested_setting, updates_per_rollout
from sorl_trl.trainers.checks.options import engine_problems, idle_options, search_rollout_problems
from sorl_trl.trainers.checks.training_noise import noise_in_arguments, noise_warning
from sorl_trl.trainers.config_rules import LOSSES_WITHOUT_MIN, adapter_problems
from sorl_trl.trainers.so_ppo_config import SOPPOConfig

MANY_UPDATES = 16
"""Of one rollout. Ours: 8 held at a moderate rate, 32 collapsed at a high one (benchmarks/results/stability.md)."""
LONG_UNIT = 100
"""Tokens of a turn or a sequence over which a ratio that is their mean moves little. Ours, measured nowhere."""
WIDE_RANGE = 0.01
"""A clip range, below 1, that such a ratio hardly leaves. Ours: GSPO's authors have 3e-4, for thousands of tokens."""


def check_batches(subject: Subject) -> Iterator[Finding]:
    """Whether the questions fill a rollout; that batches hold whole groups was checked when they were read."""
    config = _config(subject)
    size = int(config.generation_batch_size or 0)
    prompts = size // int(config.num_generations or 1)
    given(subject.questions, "questions")
    for problem in dataset_size_problems("train_questions", subject.questions_in_all, config):
        yield subject.recipe.finding(problem)
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
        what += "with 32, GRPO and PPO collapsed at a high learning rate (docs/stability.md)"
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
        yield Finding("warning", inert, line(*suggested_setting(config)))
    yield from _check_range(subject, config)
    yield from _check_noise(subject, config)
    yield from _check_critic(subject, config)
    yield Finding("ok", f"{subject.raw.trainer}, {config.loss_type} loss, {config.ratio_level} ratios")


def check_options(subject: Subject) -> Iterator[Finding]:
    """Options that the rollout of `train.py` cannot honour, and those that are read nowhere."""
    config, finding = _config(subject), subject.recipe.finding
    problems = [*search_rollout_problems(config)]
    if subject.arguments.engine is not None:
        problems += engine_problems(subject.arguments.engine, config)
    refused = {problem.option for problem in problems}
    idle = [each for each in idle_options(config, has_tools=False) if each.option not in refused]
    yield from map(finding, problems)
    yield from (finding(each, "warning") for each in idle)
    if not problems and not idle:
        yield Finding("ok", "no option is refused, and none is without effect")


def _check_range(subject: Subject, config: TurnLevelConfig) -> Iterator[Finding]:
    """Whether a fixed clip range meets ratios of units that may be long; how long they will be is not known."""
    level = config.ratio_level
    if level == "token" or config.loss_type in LOSSES_WITHOUT_MIN or config.clip_range_scaling_in_use != "none":
        return
    limits, length = subject.arguments.rollout, subject.raw.max_completion_length
    if limits is None or length is None:  # other checks say so
        return
    turns = 1 if level == "turn" else limits.max_turns + 1
    tokens = min(turns * limits.max_turn_tokens, int(length))
    low = config.epsilon or 0.0
    high = low if config.epsilon_high is None else config.epsilon_high
    if tokens >= LONG_UNIT and max(low, high) >= WIDE_RANGE:
        what = (
            f"a {level} may have {tokens} tokens, and its ratio is their mean: the more there are, the less it leaves "
            f"a fixed clip range (`epsilon` {low:g}, `epsilon_high` {high:g}), down to never, where nothing is "
            "clipped (docs/stability.md)"
        )
        scaling = "sqrt_length" if level == "turn" else "length"
        yield Finding("warning", what, subject.recipe.line("clip_range_scaling", scaling))


def _check_noise(subject: Subject, config: TurnLevelConfig) -> Iterator[Finding]:
    """Dropout of the adapter and of the model's configuration; without its weights no more of it can be seen."""
    if noise := noise_in_arguments(config):
        yield Finding("warning", noise_warning(noise, True), subject.recipe.line("neftune_noise_alpha"))
    if config.disable_dropout:
        return
    noise = [f"{name}={value:g} (the model's configuration)" for name, value in subject.config_noise.items()]
    if subject.raw.use_peft and subject.raw.lora_dropout:
        noise.append(f"lora_dropout={subject.raw.lora_dropout:g}")
    if noise:
        yield Finding("warning", noise_warning(noise, False), subject.recipe.line("disable_dropout", True))


def _check_critic(subject: Subject, config: TurnLevelConfig) -> Iterator[Finding]:
    """What the critic's construction refuses once the model is loaded."""
    if isinstance(config, SOPPOConfig):
        yield from map(subject.recipe.finding, adapter_problems(config, subject.raw.use_peft))


def _config(subject: Subject) -> TurnLevelConfig:
    return given(subject.arguments.config, "the trainer's config")
