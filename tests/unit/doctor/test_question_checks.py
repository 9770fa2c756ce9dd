"""Questions that cannot be read, rewarded or written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from sorl_trl.doctor import examine
from sorl_trl.doctor.checks import questions as question_checks
from sorl_trl.doctor.checks import rehearsal
from sorl_trl.qa import BENCHMARKS, benchmarks
from sorl_trl.trainers.agents.agent_rollout import rollout_output
from tests.unit.doctor.recipes import QUESTIONS, complaints, line_of, the_complaint, write_recipe, write_rows


def test_lines_without_answers_are_counted(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    rows: list[dict[str, Any]] = [*QUESTIONS[:3], {"id": "x", "question": "where"}, {"id": "y", "question": "why"}]
    write_rows(tmp_path / "train.jsonl", rows)
    found = the_complaint(recipe)
    assert (found.check, found.level) == ("questions", "error")
    assert found.what.startswith(f"{tmp_path}/train.jsonl, line 4: `golden_answers` must be")
    assert found.what.endswith("(2 of 5 lines have no `golden_answers`)")
    assert found.change == f"train_questions  {line_of(recipe, 'train_questions')}"


def test_a_line_too_deep_to_read(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"id": "x", "question": "where"}\n' + "[" * 100_000 + "\n")
    found = the_complaint(recipe)
    assert (found.check, found.level) == ("questions", "error")
    assert found.what.endswith("(1 of 1 lines have no `golden_answers`)")


def test_another_kind_of_file(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "train.jsonl").write_bytes(b"PAR1\x00\xff")
    found = the_complaint(recipe)
    assert (found.check, found.level) == ("questions", "error")


def test_only_some_have_options(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, rewards=["choice"])
    choice = {**QUESTIONS[0], "options": {"A": "rome", "B": "oslo"}}
    write_rows(tmp_path / "train.jsonl", [choice] * 6 + QUESTIONS[6:])
    found = the_complaint(recipe)
    assert "2 of 8 questions have no options, the first is 'q6'" in found.what


def test_those_to_evaluate_on(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, eval_questions=str(tmp_path / "eval.jsonl"))
    write_rows(tmp_path / "eval.jsonl", QUESTIONS[:2])
    assert not complaints(recipe)
    (tmp_path / "eval.jsonl").write_text("")
    found = the_complaint(recipe)
    assert found.what == f"{tmp_path}/eval.jsonl: the file is empty; it needs at least one line with a question"
    assert found.change == f"eval_questions  {line_of(recipe, 'eval_questions')}"


def test_a_public_set_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question_checks, "SAMPLE", 3)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "nq").mkdir()
    write_rows(tmp_path / "nq/train.jsonl", QUESTIONS)
    local = replace(BENCHMARKS["nq"], hub_id=str(tmp_path / "nq"), config=None)
    monkeypatch.setattr(question_checks.qa, "BENCHMARKS", {"nq": local})
    monkeypatch.setattr(benchmarks, "BENCHMARKS", {"nq": local})
    read, asked = question_checks.qa.load_benchmark, []
    monkeypatch.setattr(
        question_checks.qa, "load_benchmark", lambda *words, **named: asked.append(named) or read(*words, **named)
    )
    said = {finding.check: finding.what for finding in examine(str(write_recipe(tmp_path, train_questions="nq")))}
    assert asked == [{"limit": 3, "streaming": True}]
    assert said["questions"] == "`train_questions`: 79168"
    assert said["tokens"] == "the longest of 3 prompts has 3 tokens"


def test_an_answer_that_the_tokenizer_cannot_write(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    write_rows(tmp_path / "train.jsonl", [{**row, "golden_answers": ["Ouagadougou"]} for row in QUESTIONS])
    found = the_complaint(recipe)
    assert (found.check, found.level) == ("rehearsal", "error")
    assert "exact_match of a right answer to 'q0' is 0.0: the tokenizer writes '<unk>'" in found.what


def test_an_answer_that_is_no_action(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, max_turn_tokens=8, max_completion_length=36)
    write_rows(tmp_path / "train.jsonl", [{**row, "golden_answers": ["rome </search>"]} for row in QUESTIONS])
    found = the_complaint(recipe)
    assert (found.check, found.level) == ("rehearsal", "error")
    assert "('<answer> rome </search> </answer>', 'invalid')" in found.what


def test_a_completion_too_short_for_an_answer(tmp_path: Path) -> None:
    found = complaints(write_recipe(tmp_path, max_completion_length=9))
    assert [finding.check for finding in found] == ["tokens", "rehearsal"]
    assert found[1].what.endswith("do not fit `max_completion_length`: all would be cut short")
    found = complaints(write_recipe(tmp_path, max_completion_length=9, mask_truncated_completions=True))
    assert found[1].what.endswith("cut short and, by `mask_truncated_completions`, not trained on")


def test_a_loss_mask_that_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def masked(trajectories: Any, eos_token_id: int) -> dict[str, Any]:
        rows = rollout_output(trajectories, eos_token_id)
        return {**rows, "env_mask": [[0] * len(mask) for mask in rows["env_mask"]]}

    monkeypatch.setattr(rehearsal, "rollout_output", masked)
    found = the_complaint(write_recipe(tmp_path))
    assert (found.check, found.level) == ("rehearsal", "error")
    assert found.what.endswith("<answer> rome </answer>' was said, '' is trained on")
