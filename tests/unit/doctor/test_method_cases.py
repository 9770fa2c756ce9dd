"""Recipes whose method or options are wrong, one in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.doctor.cases import PPO, SEEUPO, Case, assert_found
from tests.unit.doctor.recipes import complaints, the_complaint, write_model, write_recipe

CASES = {
    "on-policy SeeUPO": Case(
        {**SEEUPO, "steps_per_generation": 1},
        "method",
        "one in each iteration",
        "steps_per_generation: 4",
        level="warning",
    ),
    "many updates": Case(
        {"clip_normalization": "none", "target_kl": 0, "num_iterations": 8},
        "method",
        "16 updates per rollout without",
        "target_kl: 0.005",
        level="warning",
    ),
    "no penalty": Case(
        {"ctn_coef": 0.0, "clip_normalization": "kl_penalty"}, "method", "is 0", "ctn_coef: 3.0", level="warning"
    ),
    "no checkpoint": Case(
        {"collapse_guard": "roll_back", "save_strategy": "no"},
        "method",
        "to roll back needs checkpoints",
        "save_strategy: steps",
    ),
    "no optimizer": Case(
        {"collapse_guard": "roll_back", "save_only_model": True},
        "method",
        "to roll back needs the optimizer",
        "save_only_model: false",
    ),
    "no log": Case(
        {"collapse_guard": "warn", "logging_strategy": "no"}, "method", "reads log entries", "logging_strategy: steps"
    ),
    "log entries of several steps": Case(
        {"collapse_guard": "warn", "logging_steps": 10}, "method", "learns of numbers", "logging_steps: 1", "warning"
    ),
    "an idle option of ours": Case(
        {"turn_boundary_tags": ["</tool_call>"]},
        "options",
        "`turn_boundary` is 'recorded'",
        "turn_boundary_tags",
        "warning",
    ),
    "weights": Case({"reward_weights": [1.0, 2.0]}, "method", "has 2 for 1 rewards", "reward_weights"),
    "on-policy": Case(
        {"gradient_accumulation_steps": 2},
        "method",
        "Updates per rollout: 1 (`num_iterations` 1 x `steps_per_generation` 2 / `gradient_accumulation_steps` 2)",
        "num_iterations: 4",
        level="warning",
    ),
    "dropout": Case(
        {"disable_dropout": False, "use_peft": True},
        "method",
        "The policy is trained with noise: lora_dropout=0.05.",
        "disable_dropout: true",
        level="warning",
    ),
    "noise on embeddings": Case(
        {"neftune_noise_alpha": 5.0},
        "method",
        "neftune_noise_alpha=5 (the embeddings)",
        "neftune_noise_alpha",
        level="warning",
    ),
    "continuous batching": Case(
        {"use_transformers_continuous_batching": True},
        "options",
        "`SearchRollout` needs stop strings",
        "use_transformers_continuous_batching",
    ),
    "a tool loop's limit": Case(
        {"max_tool_calling_iterations": 3}, "options", "is for TRL's tool loop", "max_tool_calling_iterations"
    ),
    "an end of its own": Case(
        {"generation_kwargs": {"max_new_tokens": 4}}, "options", "has 'max_new_tokens': 4", "generation_kwargs"
    ),
    "an idle option": Case(
        {"vllm_gpu_memory_utilization": 0.5},
        "options",
        "has no effect: `use_vllm` is False",
        "vllm_gpu_memory_utilization",
        level="warning",
    ),
    "no adapter": Case({**PPO, "critic": "adapter"}, "method", "(`use_peft` in a recipe)", "critic: head"),
    "no head": Case(
        {**PPO, "use_peft": True, "critic_trunk_gradient": True},
        "method",
        "with PEFT the default is 'adapter'",
        "critic_trunk_gradient: false",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_thing_is_wrong(tmp_path: Path, name: str) -> None:
    assert_found(tmp_path, CASES[name])


LONG = {"max_turn_tokens": 200, "max_completion_length": 700}
FIXED = {"clip_range_scaling": "none"}
TURNS = {"importance_sampling_level": "turn"}


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({}, None),
        (FIXED, "a sequence may have 600 tokens, and its ratio is their mean"),
        ({**TURNS, **FIXED}, "a turn may have 200 tokens, and its ratio is their mean"),
        ({"max_completion_length": 150, **TURNS, **FIXED}, "a turn may have 150 tokens"),
        ({"importance_sampling_level": "sequence"}, "a sequence may have 600 tokens"),
        ({"max_turn_tokens": 99, **TURNS, **FIXED}, None),
        ({"epsilon": 3e-4, "epsilon_high": 4e-4, **FIXED}, None),
        ({"epsilon": 3e-4, "epsilon_high": 0.2, **FIXED}, "`epsilon` 0.0003, `epsilon_high` 0.2"),
        ({"importance_sampling_level": "token"}, None),
        ({"loss_type": "sapo"}, None),
    ],
    ids=str,
)
def test_long_turns_want_a_range_of_their_length(tmp_path: Path, changed: dict[str, Any], what: str | None) -> None:
    write_model(tmp_path / "model", max_position_embeddings=2048)
    recipe = write_recipe(tmp_path, **{**LONG, **changed})
    found = [each for each in complaints(recipe) if each.check == "method"]
    assert len(found) == (what is not None)
    if what is not None:
        assert what in found[0].what
        scaling = "sqrt_length" if changed.get("importance_sampling_level") == "turn" else "length"
        assert found[0].change.startswith(f"clip_range_scaling: {scaling}  ")
        assert found[0].level == "warning"


def test_dropout_of_the_model(tmp_path: Path) -> None:
    write_model(tmp_path / "model", attention_dropout=0.1)
    assert not complaints(write_recipe(tmp_path))
    found = the_complaint(write_recipe(tmp_path, disable_dropout=False))
    assert "attention_dropout=0.1 (the model's configuration)" in found.what
