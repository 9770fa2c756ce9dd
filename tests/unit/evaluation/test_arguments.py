from __future__ import annotations

from pathlib import Path

from sorl_trl.evaluation import EvaluationArguments


def test_datasets_keep_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.touch()
    arguments = EvaluationArguments("run", ["nq", "medqa"], questions=[str(own)])
    assert arguments.dataset_names == ["nq", "medqa", "own"]
