"""Which policy is asked, and which recipe says how."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_trl.cli.evaluate import read_words


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that still trains."""
    (tmp_path / "run/checkpoint-2").mkdir(parents=True)
    (tmp_path / "run/checkpoint-2/config.json").touch()
    (tmp_path / "run/recipe.yaml").write_text("train_questions: train.jsonl\neval_questions: nq\nmax_turns: 7\n")
    return tmp_path / "run"


def test_a_run_that_still_trains_is_not_evaluated_in_a_checkpoint(run: Path) -> None:
    """Which training removes as it goes on."""
    words, _ = read_words([str(run)])
    assert words == [
        *("--model_name_or_path", str(run / "checkpoint-2")),
        *("--output", str(run / "evaluation_checkpoint-2")),
    ]


@pytest.mark.parametrize(
    ("policy", "is_of_run"), [(".", True), ("checkpoint-2", True), ("other", False), ("checkpoint-x", False)]
)
def test_the_recipe_of_the_run_that_trained_it(run: Path, policy: str, is_of_run: bool) -> None:
    (run / policy).mkdir(exist_ok=True)
    (run / policy / "config.json").touch()
    for words in ([str(run / policy)], ["--model_name_or_path", str(run / policy)]):
        _, recipe = read_words(words)
        assert recipe.get("max_turns") == (7 if is_of_run else None)


def test_another_policy_is_asked_as_the_run_was(run: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").touch()
    words, recipe = read_words([str(run), "--model_name_or_path", str(tmp_path / "base")])
    assert recipe["max_turns"] == 7
    assert words[-4:] == [
        *("--model_name_or_path", str(tmp_path / "base")),
        *("--output", str(tmp_path / "base/evaluation")),
    ]


def test_what_training_evaluates_on_is_asked_unless_something_else_is_named(run: Path) -> None:
    assert read_words([str(run)])[1]["benchmarks"] == ["nq"]
    assert "benchmarks" not in read_words([str(run), "--questions", "own.jsonl"])[1]
    (run / "recipe.yaml").write_text("eval_questions: eval.jsonl\n")
    assert read_words([str(run)])[1]["questions"] == ["eval.jsonl"]
