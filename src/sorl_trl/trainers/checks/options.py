"""Options of a trainer's configuration that mean nothing in a setting: refused, or said. docs/options.md has them all.

Trainers, `SearchRollout` and the doctor ask these functions; none of them needs a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from sorl_trl.checks import Problem, raise_first
from sorl_trl.rollout.options import EngineOptions

_SERVER_OPTIONS = (
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"),
    "vllm_group_port",
)
_ENGINE_OPTIONS = (
    *("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_model_impl", "vllm_enable_sleep_mode"),
    "vllm_max_model_length",
)
_CORRECTION_OPTIONS = (
    *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
)
_VLLM_OPTIONS = (
    *_SERVER_OPTIONS,
    *_ENGINE_OPTIONS,
    *_CORRECTION_OPTIONS,
    *("mismatch_veto", "vllm_mode", "vllm_structured_outputs_regex", "vllm_importance_sampling_correction"),
)


@dataclass(frozen=True)
class Idle:
    """Options that are read nowhere while `is_idle`."""

    options: tuple[str, ...]
    is_idle: Callable[[Any], bool]
    """Of the configuration."""
    why: str


def _own(config: Any, name: str) -> Any:
    """An option of our own; `SearchRollout` serves `trl.GRPOTrainer` too, whose configuration has none of them."""
    return getattr(config, name, None)


def _counts_turns(config: Any) -> bool:
    """Whether the penalty is weighed by turns whose ratio is outside the range."""
    return _own(config, "clip_normalization") == "kl_penalty" and _own(config, "ctn_gate") == "turn"


IDLE = (
    Idle(_VLLM_OPTIONS, lambda c: not c.use_vllm, "`use_vllm` is False"),
    Idle(_SERVER_OPTIONS, lambda c: c.vllm_mode == "colocate", "`vllm_mode` is 'colocate'"),
    Idle(_ENGINE_OPTIONS, lambda c: c.vllm_mode == "server", "`vllm_mode` is 'server': `vllm serve` takes them"),
    Idle(
        ("vllm_server_host", "vllm_server_port"),
        lambda c: bool(c.vllm_server_base_url),
        "`vllm_server_base_url` is set",
    ),
    Idle(
        (*_CORRECTION_OPTIONS, "mismatch_veto"),
        lambda c: not c.vllm_importance_sampling_correction,
        "`vllm_importance_sampling_correction` is False",
    ),
    Idle(
        ("cache_implementation", "use_transformers_continuous_batching"),
        lambda c: c.use_vllm,
        "with `use_vllm`, vLLM generates",
    ),
    Idle(
        ("cache_implementation",),
        lambda c: c.use_transformers_continuous_batching,
        "`use_transformers_continuous_batching` has a cache of its own",
    ),
    Idle(
        ("transformers_continuous_batching_config",),
        lambda c: not c.use_transformers_continuous_batching,
        "`use_transformers_continuous_batching` is False",
    ),
    Idle(
        ("sapo_temperature_neg", "sapo_temperature_pos"),
        lambda c: c.loss_type != "sapo",
        "they are for `loss_type='sapo'`",
    ),
    Idle(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        lambda c: c.loss_type != "vespo",
        "they are for `loss_type='vespo'`",
    ),
    Idle(
        ("minirl_cap",),
        lambda c: c.loss_type != "minirl",
        "it is for `loss_type='minirl'`",
    ),
    Idle(
        _CORRECTION_OPTIONS,
        lambda c: c.loss_type == "minirl",
        "`loss_type='minirl'` weighs each token by its own ratio to vLLM, bounded by `minirl_cap`",
    ),
    Idle(
        ("delta",),
        lambda c: c.loss_type in ("cispo", "sapo", "vespo"),
        "it bounds the ratio of PPO's min, which `loss_type` 'cispo', 'sapo' and 'vespo' do not take",
    ),
    Idle(
        ("ref_model_mixup_alpha", "ref_model_sync_steps"), lambda c: not c.sync_ref_model, "`sync_ref_model` is False"
    ),
    Idle(
        ("use_bias_correction_kl",),
        lambda c: c.beta == 0.0 or getattr(c, "kl_in_reward", False),
        "there is no reference KL in the loss",
    ),
    Idle(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        lambda c: not c.use_adaptive_entropy,
        "`use_adaptive_entropy` is False",
    ),
    Idle(
        ("scale_rewards",),
        lambda c: c.multi_objective_aggregation == "normalize_then_sum",
        "`multi_objective_aggregation='normalize_then_sum'` scales each reward by its group",
    ),
    Idle(
        ("num_completions_to_print", "log_unique_prompts"),
        lambda c: not c.log_completions,
        "`log_completions` is False",
    ),
    Idle(("turn_boundary_tags",), lambda c: _own(c, "turn_boundary") == "recorded", "`turn_boundary` is 'recorded'"),
    Idle(
        ("ctn_coef", "ctn_gate", "kl_estimator"),
        lambda c: _own(c, "clip_normalization") in ("bias_norm", "none"),
        "it is for `clip_normalization='kl_penalty'`",
    ),
    Idle(
        ("turn_ratio",),
        lambda c: _own(c, "ratio_level") in ("token", "sequence") and not _counts_turns(c),
        "turns share no ratio unless `importance_sampling_level` is 'turn'; the metrics `turns/ratio_…` alone read it",
    ),
    Idle(("label_smoothing_factor", "label_names"), lambda c: True, "the loss has no labels"),
    Idle(
        ("include_for_metrics", "batch_eval_metrics", "prediction_loss_only", "eval_do_concat_batches"),
        lambda c: True,
        "there is no `compute_metrics`: an evaluation gives the loss, the rewards and the metrics of the rollout",
    ),
    Idle(("data_seed",), lambda c: True, "the order of prompts follows `seed`"),
    Idle(
        ("train_sampling_strategy", "length_column_name"),
        lambda c: True,
        "a rollout takes whole groups of prompts, in the order of TRL's sampler",
    ),
)
"""An option may stand in several rows; the first that holds is named."""

OF_TOOLS = ("max_tool_calling_iterations",)
"""Options of TRL's tool loop."""

_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
SET_BY_ROLLOUT: Mapping[str, tuple[str, ...]] = {
    "transformers": (
        *("max_new_tokens", "max_length", "max_time", "stop_strings", "eos_token_id", "forced_eos_token_id"),
        *("pad_token_id", "token_healing", "num_beams", "num_return_sequences", "prompt_lookup_num_tokens"),
        *_OUTPUTS,
    ),
    "vllm": (
        *("max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "detokenize", "n"),
        *("logprobs", "prompt_logprobs", "truncate_prompt_tokens", "skip_special_tokens", "output_kind", "stream"),
        "seed",
    ),
}
"""Engine -> keys of `generation_kwargs` that `SearchRollout` sets itself: where a turn ends, what comes back, seed."""


def idle_options(config: Any, has_tools: bool = True) -> Iterator[Problem]:
    """Options that differ from their default and are read nowhere, each once.

    Args:
        config: the trainer's, after `__post_init__`.
        has_tools: whether TRL's tool loop runs, that is whether the trainer has `tools` or an `environment_factory`.
    """
    changed = _changed(config)
    rows = [(row.options, row.why) for row in IDLE if row.is_idle(config)]
    if not has_tools:
        rows.append((OF_TOOLS, "the trainer has no `tools` and no `environment_factory`"))
    for options, why in rows:
        for name in options:
            if name in changed:
                changed.remove(name)
                yield Problem(name, f"`{name}` is {getattr(config, name)!r}, but has no effect: {why}.")


def _changed(config: Any) -> set[str]:
    """The fields whose value is not their default."""
    plain = {each.name: each.default for each in fields(config) if each.default is not MISSING}
    made = {each.name: each.default_factory() for each in fields(config) if each.default_factory is not MISSING}
    return {name for name, default in (plain | made).items() if getattr(config, name) != default}


def engine_problems(engine: EngineOptions, config: Any) -> Iterator[Problem]:
    """Options of the engine that have no effect with vLLM."""
    is_server = config.use_vllm and config.vllm_mode == "server"
    for name, is_idle, where in (
        ("rollout_engine", config.use_vllm, "with `use_vllm`, where vLLM generates"),
        ("kv_cache_gib", config.use_vllm, "with `use_vllm`, where vLLM generates"),
        ("rejoin_after", is_server, "with a vLLM server, whose steps cannot be counted"),
    ):
        value, default = getattr(engine, name), getattr(EngineOptions, name)
        if is_idle and value != default:
            yield Problem(name, f"`{name}` is {value!r}, but has no effect {where}. Remove it.", default)


def search_rollout_problems(config: Any, tools: Any = None, environment_factory: Any = None) -> Iterator[Problem]:
    """What `SearchRollout` cannot honour of a trainer's configuration and arguments; each ends in what to do."""
    given = {"tools": tools, "environment_factory": environment_factory}
    for name in (name for name, value in given.items() if value):
        yield Problem(
            name,
            f"`{name}` is given together with `SearchRollout`, which makes whole trajectories itself: TRL's tool loop "
            "would go on after them. Use one or the other.",
        )
    if config.use_transformers_continuous_batching:
        yield Problem(
            "use_transformers_continuous_batching",
            "`use_transformers_continuous_batching` is True, but `SearchRollout` needs stop strings, which "
            "transformers' continuous batching ignores: a turn would not end where it searches or answers. Set it to "
            "False, and `use_vllm=True` for speed.",
        )
    if config.max_tool_calling_iterations is not None:
        yield Problem(
            "max_tool_calling_iterations",
            f"`max_tool_calling_iterations` is {config.max_tool_calling_iterations}, but is for TRL's tool loop, "
            "which `SearchRollout` replaces. Set `RolloutLimits.max_turns` (`max_turns` in a recipe) instead.",
        )
    if config.max_completion_length is None:
        yield Problem(
            "max_completion_length",
            "`max_completion_length` is None, but `SearchRollout` needs it: it limits a trajectory, all turns "
            "and observations together.",
        )
    yield from _generation_problems(
        config,
        "`SearchRollout` says itself where a turn ends (stop strings of its protocol, end-of-sequence tokens of model "
        "and tokenizer, `RolloutLimits`), what comes back, and with which seed each turn is sampled (`seed` of the "
        "trainer). Remove it.",
    )


def _generation_problems(config: Any, why: str) -> Iterator[Problem]:
    engine = "vllm" if config.use_vllm else "transformers"
    for key, value in (config.generation_kwargs or {}).items():
        is_default = value is None or (key in ("num_beams", "num_return_sequences", "n") and value == 1)
        if key in SET_BY_ROLLOUT[engine] and not is_default:
            yield Problem(
                "generation_kwargs",
                f"`generation_kwargs` has {key!r}: {value!r}, but {why}",
            )


def check_search_rollout(
    engine: EngineOptions, config: Any, tools: Any = None, environment_factory: Any = None
) -> None:
    """Raise ValueError with the first of `search_rollout_problems` and `engine_problems`."""
    raise_first(search_rollout_problems(config, tools, environment_factory))
    raise_first(engine_problems(engine, config))
