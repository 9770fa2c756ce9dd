"""Recipes with an argument that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.doctor.cases import PPO, SEEUPO, VLLM, Case, assert_found

CASES = {
    "unknown key": Case(
        {"max_turn": 3}, "arguments", "`max_turn` is no argument of train.py; is it `max_turns`?", "max_turn"
    ),
    "unknown trainer": Case({"trainer": "ppo"}, "arguments", "`trainer` is 'ppo'", "trainer: so_grpo"),
    "value": Case({"target_kl": -1.0}, "arguments", "`target_kl` is -1.0", "target_kl"),
    "two groups": Case({"search_top_k": 0}, "arguments", "`search_top_k` is 0", "search_top_k"),
    "reward per turn": Case(
        {"turn_boundary_tags": ["</think>"], "rewards": ["turn_format"]},
        "arguments",
        "`rewards` has 'turn_format'",
        "rewards",
    ),
    "no effect": Case(
        {**PPO, "scale_rewards": "batch"}, "arguments", "has no effect", "scale_rewards", level="warning"
    ),
    "group of one": Case({"num_generations": 1}, "arguments", "its own baseline", "num_generations: 8"),
    "turns of SeeUPO": Case(
        {**SEEUPO, "num_iterations": 2}, "arguments", "`num_iterations` is 2, but must be 3", "num_iterations: 3"
    ),
    "tags with SeeUPO": Case(
        {**SEEUPO, "turn_boundary_tags": ["</think>"]},
        "arguments",
        "`turn_boundary` is 'tags', but must be 'recorded'",
        "turn_boundary: recorded",
    ),
    "group of one, SeeUPO": Case(
        {**SEEUPO, "num_generations": 1}, "arguments", "its own baseline", "num_generations: 8"
    ),
    "groups": Case({"num_generations": 3}, "arguments", "rollout of 16 trajectories", "num_generations: 2"),
    "groups, processes": Case(
        {"num_generations": 16, "steps_per_generation": 1, "num_iterations": 2, "per_device_train_batch_size": 4},
        "arguments",
        "rollout of 12 trajectories (per_device_train_batch_size 4 x steps_per_generation 1 x processes 3)",
        "num_generations: 12",
        num_processes=3,
    ),
    "evaluation groups": Case(
        {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 6},
        "arguments",
        "an evaluation step of 6 trajectories",
        "per_device_eval_batch_size: 8",
    ),
    "no text": Case({"save_strategy": False}, "arguments", "is False, but must be text: in quotes", "save_strategy"),
    "no number": Case({"max_turns": True}, "arguments", "is True, but must be a whole number", "max_turns"),
    "no whole number": Case({"num_generations": 4.5}, "arguments", "a whole number or null", "num_generations"),
    "a word for a list": Case(
        {"rewards": "f1", "reward_weights": [1.0]},
        "arguments",
        "`rewards` is 'f1', but must be a list",
        'rewards: ["f1"]',
    ),
    "no limit": Case(
        {"max_completion_length": "null"},
        "arguments",
        "`max_completion_length` is None, but must be at least 1",
        "max_completion_length",
    ),
    "a limit of nothing": Case(
        {**VLLM, "vllm_importance_sampling_mode": "sequence_mask", "max_completion_length": 0},
        "arguments",
        "`max_completion_length` is 0, but must be at least 1",
        "max_completion_length",
    ),
    "no list": Case({"rewards": {"f1": 1}}, "arguments", "must be a list", "rewards"),
    "no truth": Case({"chat": [1]}, "arguments", "must be true or false", "chat"),
    "no list either": Case({"beta": []}, "arguments", "must be a number", "beta"),
    "no name": Case({"train_questions": 7}, "arguments", "is 7, but must be text", "train_questions"),
    "no count": Case({"num_generations": 0}, "arguments", "`num_generations` is 0, but must be", "num_generations"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_thing_is_wrong(tmp_path: Path, name: str) -> None:
    assert_found(tmp_path, CASES[name])
