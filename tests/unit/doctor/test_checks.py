"""A healthy recipe, and the same broken in one way at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sorl_trl.doctor import CHECKS, Finding, examine
from sorl_trl.doctor.subject import Subject
from tests.unit.doctor.recipes import complaints, line_of, the_complaint, write_model, write_recipe


def test_nothing_is_wrong(tmp_path: Path) -> None:
    found = examine(str(write_recipe(tmp_path)))
    assert {finding.level for finding in found} == {"ok"}, found
    assert {finding.check for finding in found} == {*CHECKS} - {"arguments"}
    assert {finding.what for finding in found} >= {
        "the longest of 8 prompts has 3 tokens",
        "16 trajectories per rollout: 4 questions x 4, 2 updates each, processes: 1",
        # <search>, two words, </search>; <information>, a word, </information>; <answer>, a word, </answer>; <eos>
        "a search and an answer, said by a script: 7 of 11 tokens and 7 of 11 tokens are trained on",
        "exact_match of the right answers: 1, 1",
        "0 of 5 observations are cut to 6 tokens; their passages take up to 2",
    }
    assert {path.name for path in tmp_path.iterdir()} == {"model", "train.jsonl", "corpus.jsonl", "recipe.yaml"}


@dataclass(frozen=True)
class Case:
    """A change, and the one finding that it must give."""

    changed: dict[str, Any]
    check: str
    what: str
    change: str
    """The argument to change, with its new value where there is one."""
    level: str = "error"
    num_processes: int = 1


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


PPO = {"trainer": "so_ppo", "num_generations": 1, "steps_per_generation": 1, "num_iterations": 2}
SEEUPO = {"trainer": "seeupo", "num_iterations": 3}
VLLM = {"use_vllm": True, "vllm_max_model_length": 64}
CASES = {
    "unknown key": Case(
        {"max_turn": 3}, "arguments", "`max_turn` is no argument of train.py; is it `max_turns`?", "max_turn"
    ),
    "unknown trainer": Case({"trainer": "ppo"}, "arguments", "`trainer` is 'ppo'", "trainer: so_grpo"),
    "value": Case({"target_kl": -1.0}, "arguments", "`target_kl` is -1.0", "target_kl"),
    "two groups": Case({"search_top_k": 0}, "arguments", "`search_top_k` is 0", "search_top_k"),
    "reward per turn": Case(
        {"turn_boundary": "tags", "rewards": ["turn_format"]}, "arguments", "`rewards` has 'turn_format'", "rewards"
    ),
    "no effect": Case(
        {**PPO, "scale_rewards": "batch"}, "arguments", "has no effect", "scale_rewards", level="warning"
    ),
    "group of one": Case({"num_generations": 1}, "arguments", "its own baseline", "num_generations: 8"),
    "turns of SeeUPO": Case(
        {**SEEUPO, "num_iterations": 2}, "arguments", "`num_iterations` is 2, but must be 3", "num_iterations: 3"
    ),
    "tags with SeeUPO": Case(
        {**SEEUPO, "turn_boundary": "tags"},
        "arguments",
        "`turn_boundary` is 'tags', but must be 'recorded'",
        "turn_boundary: recorded",
    ),
    "on-policy SeeUPO": Case(
        {**SEEUPO, "steps_per_generation": 1},
        "method",
        "one in each iteration",
        "steps_per_generation: 4",
        level="warning",
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
    "too few questions": Case(
        {"steps_per_generation": 6},
        "batches",
        "`train_questions` has 8 prompts, but a rollout takes 12",
        "train_questions",
    ),
    "options": Case(
        {"rewards": ["choice"]},
        "questions",
        "8 of 8 questions have no options, the first is 'q0'; 'answer' is for both kinds (line 1 of ",
        'rewards: ["answer"]',
    ),
    "budget": Case(
        {"max_completion_length": 29},
        "tokens",
        "take 30 tokens, but `max_completion_length` is 29: where all are that long, 1 of 2 searches fit",
        "max_completion_length: 30",
        level="warning",
    ),
    "positions": Case(
        {"max_completion_length": 62},
        "tokens",
        "`max_completion_length` 65, but the model has 64 positions: trajectories that reach it end there",
        "max_completion_length: 61",
        level="warning",
    ),
    "vLLM's window": Case(
        {**VLLM, "vllm_max_model_length": 32, "vllm_importance_sampling_mode": "token_truncate"},
        "tokens",
        "33, but `vllm_max_model_length` is 32: trajectories that reach it end there, with `context_limit`",
        "vllm_max_model_length: 33",
        level="warning",
    ),
    "a prompt beyond vLLM's window": Case(
        {**VLLM, "vllm_max_model_length": 3, "vllm_importance_sampling_mode": "token_truncate"},
        "tokens",
        "33, but `vllm_max_model_length` is 3: that prompt gets no answer",
        "vllm_max_model_length: 33",
    ),
    "sequence_mask": Case(
        VLLM | {"vllm_importance_sampling_mode": "sequence_mask"},
        "vllm",
        "one of 30 tokens that differ by 0.04 nats in the mean is beyond vllm_importance_sampling_clip_max 3.0 and "
        "gets weight 0",
        "vllm_importance_sampling_mode: token_truncate",
        level="warning",
    ),
    "top k": Case(
        {"search_top_k": 6, "max_observation_tokens": 20, "max_completion_length": 58},
        "search",
        "no more than 4 passages for any of 5 questions, but `search_top_k` is 6",
        "search_top_k: 4",
        level="warning",
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
    "nothing to resume": Case(
        {"resume_from_checkpoint": "gone/checkpoint-3"},
        "model",
        "is 'gone/checkpoint-3', but must be the folder of a checkpoint: there is no such folder",
        "resume_from_checkpoint",
    ),
    "resume from no checkpoint": Case(
        {"resume_from_checkpoint": "."},
        "model",
        "is '.', but must be the folder of a checkpoint: it holds no trainer_state.json",
        "resume_from_checkpoint",
    ),
    "no list": Case({"rewards": {"f1": 1}}, "arguments", "must be a list", "rewards"),
    "no truth": Case({"chat": [1]}, "arguments", "must be true or false", "chat"),
    "no list either": Case({"beta": []}, "arguments", "must be a number", "beta"),
    "no name": Case({"train_questions": 7}, "arguments", "is 7, but must be text", "train_questions"),
    "no count": Case({"num_generations": 0}, "arguments", "`num_generations` is 0, but must be", "num_generations"),
    "no model": Case({"model_name_or_path": None}, "model", "is missing", "model_name_or_path"),
    "a set that is not here": Case({"train_questions": "nq"}, "questions", "", "train_questions"),
    "turn": Case({"max_turn_tokens": 2}, "rehearsal", "takes 4 tokens; `max_turn_tokens` is 2", "max_turn_tokens: 4"),
    "frame": Case(
        {"max_observation_tokens": 1},
        "rehearsal",
        "max_observation_tokens=1 must be at least 2",
        "max_observation_tokens",
    ),
    "no room in the frame": Case(
        {"max_observation_tokens": 2},
        "rehearsal",
        "question 'q0': `max_observation_tokens` of 2 has no room for a passage",
        "max_observation_tokens",
    ),
    "observations": Case(
        {"max_observation_tokens": 3},
        "rehearsal",
        "5 of 5 observations are cut to 3 tokens",
        "max_observation_tokens",
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
    "long observations end it": Case(
        {"max_observation_tokens": 3, "on_long_observation": "stop"},
        "rehearsal",
        "5 of 5 observations end the trajectory, with more than 3 tokens; their passages take up to ",
        "max_observation_tokens",
        level="warning",
    ),
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
    "an option of a tool loop": Case(
        {"tool_concurrency": 4},
        "options",
        "has no effect: the trainer has no `tools`",
        "tool_concurrency",
        level="warning",
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
    case = CASES[name]
    recipe = write_recipe(tmp_path, **case.changed)
    recipe.write_text(recipe.read_text().replace('"null"', "null"))
    found = the_complaint(recipe, num_processes=case.num_processes)
    assert (found.check, found.level) == (case.check, case.level)
    assert case.what in found.what
    argument = case.change.partition(":")[0]
    place = line_of(recipe, argument) if f"\n{argument}:" in recipe.read_text() else f"(not in {recipe} yet)"
    assert found.change == f"{case.change}  {place}"


def test_the_numbers_next_to_the_limit_are_fine(tmp_path: Path) -> None:
    assert not complaints(write_recipe(tmp_path, max_completion_length=61, num_iterations=7, target_kl=0))
    assert not complaints(write_recipe(tmp_path, steps_per_generation=4))


def test_nothing_is_wrong_with_seeupo(tmp_path: Path) -> None:
    assert complaints(write_recipe(tmp_path, **SEEUPO)) == []


def test_dropout_of_the_model(tmp_path: Path) -> None:
    write_model(tmp_path / "model", attention_dropout=0.1)
    assert not complaints(write_recipe(tmp_path))
    found = the_complaint(write_recipe(tmp_path, disable_dropout=False))
    assert "attention_dropout=0.1 (the model's configuration)" in found.what


def test_kinds_that_are_as_good(tmp_path: Path) -> None:
    words = {"scale_rewards": False, "learning_rate": "1e-6", "generation_kwargs": {"top_k": 5}, "beta": 0}
    assert not complaints(write_recipe(tmp_path, **words, lora_target_modules="all-linear"))


def test_a_checkpoint_to_resume_from(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3/trainer_state.json").write_text("{}")
    assert not complaints(write_recipe(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-3")))


def test_without_a_limit_what_rests_on_it_is_skipped(tmp_path: Path) -> None:
    found = examine(str(write_recipe(tmp_path, max_completion_length=0)))
    skipped = {finding.check: finding.what for finding in found if finding.level == "skipped"}
    assert skipped.keys() == {"tokens", "rehearsal"}
    assert set(skipped.values()) == {"not checked, for want of a `max_completion_length`"}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_that_fails_does_not_hide_the_others(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(subject: Subject) -> Iterator[Finding]:
        yield Finding("warning", "seen before")
        raise TypeError("no\nsuch thing")

    monkeypatch.setitem(CHECKS, name, broken)
    found = examine(str(write_recipe(tmp_path)))
    assert [(each.check, each.level, each.what) for each in found if each.level in ("error", "warning")] == [
        (name, "warning", "seen before"),
        (name, "error", "this check itself failed: TypeError: no such thing"),
    ]
    assert {each.check for each in found} >= {*CHECKS} - {"arguments"}
    assert "broken" in caplog.text, "the traceback"


def test_a_mistake_does_not_hide_the_next(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, num_generations=3, protocol="xml", corpus=None, max_steps_=1)
    found = complaints(recipe)
    assert [finding.check for finding in found] == ["arguments"] * 4
    assert {finding.change.split()[0].strip(":") for finding in found} >= {"num_generations", "protocol", "max_steps_"}


def test_what_rests_on_a_mistake_is_skipped(tmp_path: Path) -> None:
    found = examine(str(write_recipe(tmp_path, protocol="xml")))
    skipped = {finding.check: finding.what for finding in found if finding.level == "skipped"}
    assert skipped.keys() == {"tags", "chat", "tokens", "search", "rehearsal"}
    assert set(skipped.values()) == {"not checked, for want of the arguments of the rollout"}
