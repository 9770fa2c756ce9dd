"""The leaderboard's tasks in examples/bfcl: as its recipe trains on them, and as they are evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("bfcl_eval")

from tests.documentation import ROOT
from tests.tools import qwen_tokenizer

from examples.bfcl.function_callers import SOLUTION, talking_policy
from examples.bfcl.tasks import rows_of, task_of, write_rows
from sorl_trl.cli import evaluate
from sorl_trl.cli.main import main as sorl
from sorl_trl.cli.train import main as train
from sorl_trl.command_line import run_command
from sorl_trl.records.evaluated import read_evaluated


def test_the_recipe_trains_and_its_policy_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    task = task_of("multi_turn_base_1:1")
    assert task.solution == ((SOLUTION,),)
    write_rows(rows_of([task], compact=True) * 8, "tasks.jsonl")
    talking_policy().save_pretrained("policy")
    qwen_tokenizer().save_pretrained("policy")
    words = ["--config", str(ROOT / "examples/bfcl/smollm2.yaml"), "--train_questions", "tasks.jsonl"]
    words += ["--model_name_or_path", "policy", "--output_dir", "out", "--rewards", "environment", "solved"]
    words += ["--max_steps", "2", "--steps_per_generation", "4", "--max_turn_tokens", "24", "--disable_tqdm", "true"]
    assert run_command(train, words) == 0
    log = json.loads(Path("out/trainer_state.json").read_text())["log_history"]
    first = next(entry for entry in log if "environment/solved" in entry)
    assert 0.1 < first["environment/solved"] < 0.9
    assert first["reward"] == pytest.approx(2 * first["environment/solved"])

    sampled = ["--num_samples", "4", "--temperature", "1", "--limit", "2"]
    evaluate.main(["out", "--questions", "tasks.jsonl", *sampled])
    rows = list(read_evaluated("out/evaluation", "tasks"))
    measured = [json.loads(row["environment"]) for row in rows]
    assert [row["correct"] for row in rows] == [each["solved"] for each in measured]
    assert max(each["calls_per_request"] for each in measured) > 0
    assert {"solved_in_GorillaFileSystem", "wrong_call"} <= {*measured[0]}
    sorl(["view", "out/evaluation", "-o", "page.html"])
    evaluate.compare(["out", "out"])
    assert "| solved " in capsys.readouterr().out
