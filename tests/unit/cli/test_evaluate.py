"""Which recipe says how a policy is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_trl.cli.evaluate import read_words


def test_a_run_that_still_trains_is_not_evaluated_in_a_checkpoint(tmp_path: Path) -> None:
    """Which training removes as it goes on."""
    (tmp_path / "run/checkpoint-2").mkdir(parents=True)
    (tmp_path / "run/checkpoint-2/config.json").touch()
    words, _ = read_words([str(tmp_path / "run")])
    assert words[-1] == str(tmp_path / "run/evaluation_checkpoint-2")


@pytest.mark.parametrize(
    ("policy", "found"), [("run", True), ("run/checkpoint-2", True), ("run/other", False), ("run/checkpoint-x", False)]
)
def test_the_recipe_of_the_run_that_trained_it(tmp_path: Path, policy: str, found: bool) -> None:
    (tmp_path / policy).mkdir(parents=True)
    (tmp_path / policy / "config.json").touch()
    (tmp_path / "run/recipe.yaml").write_text("train_questions: train.jsonl\nmax_turns: 7\n")
    _, recipe = read_words([str(tmp_path / policy)])
    assert recipe.get("max_turns") == (7 if found else None)
