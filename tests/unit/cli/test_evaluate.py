"""Which recipe says how a policy is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_trl.cli.evaluate import read_words


@pytest.mark.parametrize(
    ("policy", "found"), [("run", True), ("run/checkpoint-2", True), ("run/other", False), ("run/checkpoint-x", False)]
)
def test_the_recipe_of_the_run_that_trained_it(tmp_path: Path, policy: str, found: bool) -> None:
    (tmp_path / policy).mkdir(parents=True)
    (tmp_path / policy / "config.json").touch()
    (tmp_path / "run/recipe.yaml").write_text("train_questions: train.jsonl\nmax_turns: 7\n")
    _, recipe = read_words([str(tmp_path / policy)])
    assert recipe.get("max_turns") == (7 if found else None)
