from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_trl.evaluation import EvaluationArguments


def test_datasets_keep_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.touch()
    arguments = EvaluationArguments("run", ["nq", "medqa"], questions=[str(own)])
    assert arguments.dataset_names == ["nq", "medqa", "own"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"benchmarks": ["squad"]}, "`benchmarks` has 'squad', but must be of nq, "),
        ({"benchmarks": []}, "both empty"),
        ({"benchmarks": ["nq", "nq"]}, "name 'nq' twice"),
        ({"questions": ["gone.jsonl"]}, "`questions` has 'gone.jsonl'"),
        ({"limit": 0}, "`limit` is 0"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"max_completion_length": 0}, "`max_completion_length` is 0"),
        ({"num_samples": 0}, "`num_samples` is 0"),
        ({"temperature": -1.0}, "`temperature` is -1.0"),
        ({"temperature": 1.0, "top_p": 0.0}, "`top_p` is 0.0"),
        ({"num_samples": 4}, "greedy, but `num_samples` is 4"),
        ({"top_p": 0.9}, "greedy.*`top_p` 0.9"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluationArguments(**{"output": "run", "benchmarks": ["nq"], **values})
