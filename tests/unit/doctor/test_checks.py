"""A healthy recipe, and the same broken in one way at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sorl_trl.doctor import CHECKS, Finding, examine
from sorl_trl.doctor.subject import Subject
from tests.unit.doctor.cases import SEEUPO, VLLM, Case, assert_found
from tests.unit.doctor.recipes import complaints, write_recipe

CASES = {
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
    "long observations end it": Case(
        {"max_observation_tokens": 3, "on_long_observation": "stop"},
        "rehearsal",
        "5 of 5 observations end the trajectory, with more than 3 tokens; their passages take up to ",
        "max_observation_tokens",
        level="warning",
    ),
}


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


@pytest.mark.parametrize("name", CASES)
def test_one_thing_is_wrong(tmp_path: Path, name: str) -> None:
    assert_found(tmp_path, CASES[name])


def test_the_numbers_next_to_the_limit_are_fine(tmp_path: Path) -> None:
    assert not complaints(write_recipe(tmp_path, max_completion_length=61, num_iterations=7, target_kl=0))
    assert not complaints(write_recipe(tmp_path, steps_per_generation=4))


def test_nothing_is_wrong_with_seeupo(tmp_path: Path) -> None:
    assert complaints(write_recipe(tmp_path, **SEEUPO)) == []


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
