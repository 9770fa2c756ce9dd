"""What a user gets wrong on the scripts' command lines: one line that says what to do, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import evaluate
import pytest
import quickstart
import train

from sorl_trl.command_line import run_command
from tests.agents import agent_policy, agent_tokenizer

QUESTION = '{"id": "1", "question": "who?", "golden_answers": ["ann"]}\n'
PASSAGE = '{"id": "1", "contents": "Title\\ntext"}\n'
TRAIN = ["--train_questions", "questions.jsonl", "--corpus", "corpus.jsonl", "--model_name_or_path", "policy"]
TRAIN += ["--output_dir", "out", "--use_cpu", "--bf16=false", "--max_steps=1"]
EVALUATE = ["--model_name_or_path", "policy", "--questions", "questions.jsonl", "--no_search", "--output"]


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (train.main, [*TRAIN, "--resume_from_checkpoint", "empty"], "'empty', but empty is no whole checkpoint"),
        (evaluate.main, [*EVALUATE, "run", "--model_name_or_path", "no/such"], "but there is no such folder"),
        (quickstart.main, ["--output", "questions.jsonl"], "Not a directory: "),
        (quickstart.main, ["--output", "policy"], "policy holds something else than a quickstart"),
    ],
)
def test_it_is_one_line_and_nothing_is_written(
    main: Callable[[Sequence[str]], None],
    words: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent_policy().save_pretrained(tmp_path / "policy")
    agent_tokenizer().save_pretrained(tmp_path / "policy")
    (tmp_path / "empty").mkdir()
    (tmp_path / "questions.jsonl").write_text(QUESTION)
    (tmp_path / "corpus.jsonl").write_text(PASSAGE)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert run_command(main, words) == 2
    shown = capsys.readouterr()
    line = shown.err.splitlines()[-1]  # libraries show progress before
    assert line.startswith("error: ") and said in line
    assert "Traceback" not in shown.err and shown.out == ""
    assert sorted(tmp_path.rglob("*")) == before
