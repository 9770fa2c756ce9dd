"""What a setting cannot honour is refused before anything is loaded, and what is read nowhere is said."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import AgentRollout, SearchRollout, SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer
from sorl_trl.rollout import Collector, EngineOptions, HFGenerator, SearchResponder, SlotEngine
from sorl_trl.sandbox import PROTOCOL
from sorl_trl.search import NoSearch
from sorl_trl.trainers.checked_options import warn_of_idle_options
from sorl_trl.trainers.checks.options import (
    IDLE,
    OF_TOOLS,
    SET_BY_ROLLOUT,
    engine_problems,
    idle_options,
    search_rollout_problems,
    tool_engine_problems,
)
from sorl_trl.trainers.turns.spans import checked_rollout
from tests.agents import (
    LIMITS,
    agent_policy,
    build_agent,
    native_agent,
    questions,
    recorded_policy,
    turns_reward,
)
from tests.training import settings
from tests.trajectories import FixedRollout, parity_reward, prompts

REFUSED: dict[str, tuple[Any, str]] = {
    "use_transformers_continuous_batching": (True, "ignores: a turn would not end where it searches or answers"),
    "max_tool_calling_iterations": (3, "`max_tool_calling_iterations` is 3, but is for TRL's tool loop"),
    "max_completion_length": (None, "`max_completion_length` is None, but `SearchRollout` needs it"),
    "generation_kwargs": ({"max_new_tokens": 5}, "`generation_kwargs` has 'max_new_tokens': 5, but `SearchRollout`"),
}
"""Option -> a value that `SearchRollout` cannot honour, and what is said."""
IDLE_VALUES: dict[str, Any] = {
    "vllm_mode": "server",
    "vllm_model_impl": "transformers",
    "vllm_enable_sleep_mode": True,
    "vllm_structured_outputs_regex": "[a-z]+",
    "vllm_server_base_url": "http://10.0.0.1:1",
    "vllm_server_host": "10.0.0.1",
    "vllm_server_port": 8001,
    "vllm_server_timeout": 3.0,
    "vllm_group_port": 51217,
    "vllm_gpu_memory_utilization": 0.5,
    "vllm_max_model_length": 64,
    "vllm_tensor_parallel_size": 2,
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_clip_min": 0.5,
    "mismatch_veto": 1e-4,
    "minirl_cap": 3.0,
    "transformers_continuous_batching_config": {"max_memory_percent": 0.2},
    "sapo_temperature_neg": 2.0,
    "sapo_temperature_pos": 2.0,
    "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 1.0,
    "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0,
    "ref_model_mixup_alpha": 0.1,
    "ref_model_sync_steps": 3,
    "use_bias_correction_kl": False,
    "entropy_coef_min": 0.01,
    "entropy_coef_max": 0.5,
    "entropy_coef_delta": 0.1,
    "entropy_target": 1.0,
    "num_completions_to_print": 2,
    "log_unique_prompts": True,
    "label_smoothing_factor": 0.1,
    "label_names": ["x"],
    "include_for_metrics": ["loss"],
    "batch_eval_metrics": True,
    "prediction_loss_only": True,
    "eval_do_concat_batches": False,
    "data_seed": 7,
    "train_sampling_strategy": "sequential",
    "length_column_name": "size",
    "max_tool_calling_iterations": 3,
    "tool_concurrency": 4,
    "tool_timeout_s": 5.0,
    "tool_engine": "auto",
}
"""Option -> a value; under the settings of the tests it is read nowhere."""
IDLE_ELSEWHERE: list[tuple[str, dict[str, Any]]] = [
    ("cache_implementation", {"use_vllm": True, "cache_implementation": "static"}),
    ("cache_implementation", {"use_transformers_continuous_batching": True, "cache_implementation": "static"}),
    ("use_transformers_continuous_batching", {"use_vllm": True, "use_transformers_continuous_batching": True}),
    ("tool_engine", {"use_vllm": True, "tool_engine": "auto"}),
    ("tool_engine", {"use_transformers_continuous_batching": True, "tool_engine": "auto"}),
    ("delta", {"delta": 2.0, "loss_type": "sapo"}),
    ("turn_boundary_tags", {"turn_boundary_tags": ["</tool_call>"]}),
    ("ctn_coef", {"ctn_coef": 9.0, "clip_normalization": "none"}),
    ("ctn_gate", {"ctn_gate": "turn", "clip_normalization": "bias_norm"}),
    ("kl_estimator", {"kl_estimator": "k1", "clip_normalization": "none"}),
    ("turn_ratio", {"turn_ratio": "arithmetic", "importance_sampling_level": "token"}),
    ("turn_ratio", {"turn_ratio": "arithmetic", "importance_sampling_level": "sequence"}),
    (
        "scale_rewards",
        {"scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum"},
    ),
    ("vllm_server_port", {"use_vllm": True, "vllm_server_port": 8001}),
    ("vllm_gpu_memory_utilization", {"use_vllm": True, "vllm_mode": "server", "vllm_gpu_memory_utilization": 0.5}),
    (
        "vllm_server_host",
        {
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": "http://10.0.0.1:1",
            "vllm_server_host": "10.0.0.1",
        },
    ),
    (
        "vllm_importance_sampling_mode",
        {
            "use_vllm": True,
            "vllm_importance_sampling_correction": False,
            "vllm_importance_sampling_mode": "token_truncate",
        },
    ),
    ("mismatch_veto", {"use_vllm": True, "vllm_importance_sampling_correction": False, "mismatch_veto": 1e-4}),
    (
        "vllm_importance_sampling_mode",
        {"use_vllm": True, "loss_type": "minirl", "vllm_importance_sampling_mode": "token_truncate"},
    ),
]


def config(tmp_path: Path, config_class: Any = SOGRPOConfig, **overrides: Any) -> Any:
    return config_class(output_dir=str(tmp_path), use_cpu=True, bf16=False, **overrides)


@pytest.mark.parametrize("trainer_class", [SOGRPOTrainer, SOPPOTrainer])
@pytest.mark.parametrize("option", REFUSED)
def test_refused_before_a_model_is_loaded(tmp_path: Path, option: str, trainer_class: Any) -> None:
    value, said = REFUSED[option]
    rollout = SearchRollout(NoSearch())
    chosen = config(tmp_path, trainer_class.config_class, **{option: value})
    with pytest.raises(ValueError, match=said):
        trainer_class("no/such-model", turns_reward, chosen, questions(), rollout_func=rollout)


def test_the_deprecated_names(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="`use_transformers_paged` is deprecated"):
        chosen = config(tmp_path, use_transformers_paged=True)
    with pytest.raises(ValueError, match="`use_transformers_continuous_batching` is True, but `SearchRollout`"):
        SOGRPOTrainer("no/such-model", turns_reward, chosen, questions(), rollout_func=SearchRollout(NoSearch()))


@pytest.mark.parametrize(
    "option",
    [{"auto_find_batch_size": True}, {"log_completions_hub_repo": "a/b"}],
    ids=lambda option: next(iter(option)),
)
def test_refused_by_trl(tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        config(tmp_path, **option)


@pytest.mark.parametrize("argument", ["tools", "environment_factory"])
def test_tools_beside_a_search_rollout(tmp_path: Path, argument: str) -> None:
    rollout, given = SearchRollout(NoSearch()), {"tools": [len], "environment_factory": dict}[argument]
    with pytest.raises(ValueError, match=f"`{argument}` is given together with `SearchRollout`"):
        SOGRPOTrainer(
            "no/such-model",
            turns_reward,
            config(tmp_path),
            questions(),
            rollout_func=rollout,
            **{argument: given},
        )


@pytest.mark.parametrize("option", [name for name in REFUSED if name != "max_completion_length"])
def test_trls_own_trainer_is_told_in_its_first_rollout(tmp_path: Path, option: str) -> None:
    value, said = REFUSED[option]
    trainer = build_agent(tmp_path, NoSearch(), GRPOTrainer, **{option: value})
    with pytest.raises(ValueError, match=said):
        trainer.train()


@pytest.mark.parametrize("engine", SET_BY_ROLLOUT)
def test_ends_and_outputs_are_the_rollouts(tmp_path: Path, engine: str) -> None:
    for key in SET_BY_ROLLOUT[engine]:
        chosen = config(tmp_path, use_vllm=engine == "vllm", generation_kwargs={key: 2})
        assert [problem.option for problem in search_rollout_problems(chosen)] == ["generation_kwargs"]
    free = {"top_k": 3, "num_beams": 1, "max_length": None}
    assert not [*search_rollout_problems(config(tmp_path, generation_kwargs=free))]


def test_other_rollouts_are_not_asked(tmp_path: Path, tokenizer: Any, policy: Any) -> None:
    """What a rollout function of somebody else's makes of these options is its own business."""
    chosen = SOGRPOConfig(**settings(tmp_path, max_tool_calling_iterations=3))
    SOGRPOTrainer(policy, parity_reward, chosen, prompts(), processing_class=tokenizer, rollout_func=FixedRollout())


@pytest.mark.parametrize("trainer_class", [SOGRPOTrainer, SOPPOTrainer])
def test_continuous_batching_in_trls_own_generation(tmp_path: Path, trainer_class: Any) -> None:
    trainer = native_agent(
        tmp_path,
        recorded_policy(),
        trainer_class,
        use_transformers_continuous_batching=True,
        # Few tokens at once: what they need must fit into the share, however little memory the machine has left.
        transformers_continuous_batching_config={"max_memory_percent": 0.02, "max_batch_tokens": 512},
        max_steps=1,
    )
    assert trainer.continuous_batching_config.max_memory_percent == 0.02
    trainer.train()
    assert trainer.model.asked == []  # `generate_batch` was called instead
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("config_class", [SOGRPOConfig, SOPPOConfig, GRPOConfig])
def test_nothing_is_idle_by_default(tmp_path: Path, config_class: Any) -> None:
    assert not [*idle_options(config(tmp_path, config_class), has_tools=False)]


@pytest.mark.parametrize("option", IDLE_VALUES)
def test_what_is_read_nowhere(tmp_path: Path, option: str) -> None:
    chosen = config(tmp_path, **{option: IDLE_VALUES[option]})
    (problem,) = idle_options(chosen, has_tools=False)
    assert problem.option == option
    assert problem.what.startswith(f"`{option}` is {IDLE_VALUES[option]!r}, but has no effect: ")


@pytest.mark.parametrize(("option", "overrides"), IDLE_ELSEWHERE)
def test_what_is_read_nowhere_beside_others(tmp_path: Path, option: str, overrides: dict[str, Any]) -> None:
    assert option in [problem.option for problem in idle_options(config(tmp_path, **overrides))]


def test_a_policy_that_reads_images_is_called_tools_as_trl_calls_them(tmp_path: Path, caplog: Any) -> None:
    chosen = config(tmp_path, tool_concurrency=2, tool_timeout_s=1.0, tool_engine="slots")
    assert not [*idle_options(chosen)]
    with caplog.at_level(logging.WARNING):
        warn_of_idle_options(chosen, has_tools=True, is_vlm=True, has_rollout=False)
    said = [record.message for record in caplog.records]
    for name, text in zip(["tool_concurrency", "tool_timeout_s", "tool_engine"], said, strict=True):
        assert f"`{name}`" in text and "has no effect: the policy reads images" in text


def test_the_engine_of_tools_says_itself_where_a_turn_ends(tmp_path: Path) -> None:
    ends = {"generation_kwargs": {"max_new_tokens": 5, "top_k": 3}}
    chosen = SOGRPOConfig(**settings(tmp_path, tool_engine="auto", **ends))
    with pytest.raises(ValueError, match="has 'max_new_tokens': 5, but `tool_engine='auto'` says itself"):
        SOGRPOTrainer("/no/model", parity_reward, chosen, questions(), tools=[turns_reward])
    (idle,) = idle_options(config(tmp_path, tool_engine="auto"), has_rollout=True)
    assert idle.what == "`tool_engine` is 'auto', but has no effect: the `rollout_func` generates."
    for other in ({"tool_engine": "trl"}, {"tool_engine": "auto", "use_vllm": True}):
        assert not [*tool_engine_problems(config(tmp_path, **ends, **other))]


def test_every_rule_is_tried() -> None:
    tried = {*IDLE_VALUES, *(option for option, _ in IDLE_ELSEWHERE)}
    assert {name for row in IDLE for name in row.options} | set(OF_TOOLS) == tried
    fields = {each.name for each in dataclasses.fields(SOGRPOConfig)}
    assert tried <= fields


def test_the_trainer_says_it_when_it_is_built(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build_agent(tmp_path, NoSearch(), model=agent_policy(), sapo_temperature_neg=2.0)
    assert caplog.text.count("`sapo_temperature_neg` is 2.0, but has no effect: they are for") == 1


@pytest.mark.parametrize(
    ("engine", "options", "where"),
    [
        ({"rollout_engine": "slots"}, {"use_vllm": True}, "with `use_vllm`, where vLLM generates"),
        ({"kv_cache_gib": 2.0}, {"use_vllm": True}, "with `use_vllm`, where vLLM generates"),
        ({"rejoin_after": 2}, {"use_vllm": True, "vllm_mode": "server"}, "with a vLLM server"),
    ],
)
def test_options_of_the_engine_without_effect(
    tmp_path: Path, engine: dict[str, Any], options: dict[str, Any], where: str
) -> None:
    ((name, value),) = engine.items()
    rollout = SearchRollout(NoSearch(), engine=EngineOptions(**engine))
    with pytest.raises(ValueError, match=f"`{name}` is {value!r}, but has no effect {where}"):
        SOGRPOTrainer("no/such-model", turns_reward, config(tmp_path, **options), questions(), rollout_func=rollout)
    colocated = config(tmp_path, use_vllm=True, vllm_mode="colocate")
    assert not [*engine_problems(EngineOptions(rejoin_after=2), colocated)]


@pytest.mark.parametrize("without", [{"rejoin_after": 2}, {"kv_cache_gib": 2.0}], ids=str)
def test_options_of_the_engine_without_effect_in_lock_step(without: dict[str, Any]) -> None:
    ((name, value),) = without.items()
    with pytest.raises(ValueError, match=f"`{name}` is {value!r}, but has no effect with `rollout_engine='lockstep'`"):
        EngineOptions(rollout_engine="lockstep", **without)
    assert EngineOptions(rollout_engine="lockstep", rejoin_after=0).rejoin_after == 0, "what lock-step does anyway"


def test_a_responder_says_itself_how_many_threads_it_has() -> None:
    with pytest.raises(ValueError, match=r"engine\.search_concurrency=2 is for `SearchRollout`: a SearchResponder"):
        AgentRollout(SearchResponder(NoSearch()), engine=EngineOptions(search_concurrency=2))


@pytest.mark.parametrize("engine", ["auto", "slots", "lockstep"])
def test_the_engine_is_the_one_named(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    trainer = build_agent(tmp_path, NoSearch(), max_steps=1)
    trainer.rollout_func = checked_rollout(
        SearchRollout(NoSearch(), PROTOCOL, LIMITS, engine=EngineOptions(rollout_engine=engine))
    )
    generate = HFGenerator.generate
    monkeypatch.setattr(HFGenerator, "generate", lambda *args: calls.append(args) or generate(*args))
    trainer.train()
    assert bool(calls) == (engine == "lockstep")


def test_options_of_the_engine_reach_the_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    collect = Collector.collect
    monkeypatch.setattr(Collector, "collect", lambda self, *args: seen.append(self) or collect(self, *args))
    trainer = build_agent(tmp_path, NoSearch(), max_steps=1)
    opened: list[Any] = []
    open_engine = SlotEngine.open
    monkeypatch.setattr(SlotEngine, "open", lambda self, rows: opened.append(self) or open_engine(self, rows))
    engine = EngineOptions(rejoin_after=1, search_concurrency=1, kv_cache_gib=0.25)
    trainer.rollout_func = checked_rollout(SearchRollout(NoSearch(), PROTOCOL, LIMITS, engine=engine))
    trainer.train()
    assert {(each.rejoin_after, each.responder._concurrency) for each in seen} == {(1, 1)}
    assert {each._budget for each in opened} == {2**28}
