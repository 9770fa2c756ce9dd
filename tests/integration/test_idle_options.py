"""What is read nowhere is said when the trainer is built."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig

from sorl_trl import SOGRPOConfig, SOPPOConfig
from sorl_trl.search import NoSearch
from sorl_trl.trainers.checks.options import (
    IDLE,
    OF_TOOLS,
    idle_options,
)
from tests.agents import (
    agent_policy,
    build_agent,
)
from tests.training import cpu_config

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
}
"""Option -> a value; under the settings of the tests it is read nowhere."""
IDLE_ELSEWHERE: list[tuple[str, dict[str, Any]]] = [
    ("cache_implementation", {"use_vllm": True, "cache_implementation": "static"}),
    ("cache_implementation", {"use_transformers_continuous_batching": True, "cache_implementation": "static"}),
    ("use_transformers_continuous_batching", {"use_vllm": True, "use_transformers_continuous_batching": True}),
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


@pytest.mark.parametrize("config_class", [SOGRPOConfig, SOPPOConfig, GRPOConfig])
def test_nothing_is_idle_by_default(tmp_path: Path, config_class: Any) -> None:
    assert not [*idle_options(cpu_config(tmp_path, config_class), has_tools=False)]


@pytest.mark.parametrize("option", IDLE_VALUES)
def test_what_is_read_nowhere(tmp_path: Path, option: str) -> None:
    chosen = cpu_config(tmp_path, **{option: IDLE_VALUES[option]})
    (problem,) = idle_options(chosen, has_tools=False)
    assert problem.option == option
    assert problem.what.startswith(f"`{option}` is {IDLE_VALUES[option]!r}, but has no effect: ")


@pytest.mark.parametrize(("option", "overrides"), IDLE_ELSEWHERE)
def test_what_is_read_nowhere_beside_others(tmp_path: Path, option: str, overrides: dict[str, Any]) -> None:
    assert option in [problem.option for problem in idle_options(cpu_config(tmp_path, **overrides))]


def test_every_rule_is_tried() -> None:
    tried = {*IDLE_VALUES, *(option for option, _ in IDLE_ELSEWHERE)}
    assert {name for row in IDLE for name in row.options} | set(OF_TOOLS) == tried
    fields = {each.name for each in dataclasses.fields(SOGRPOConfig)}
    assert tried <= fields


def test_the_trainer_says_it_when_it_is_built(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build_agent(tmp_path, NoSearch(), model=agent_policy(), sapo_temperature_neg=2.0)
    assert caplog.text.count("`sapo_temperature_neg` is 2.0, but has no effect: they are for") == 1
