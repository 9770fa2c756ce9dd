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

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/so_grpo.yaml"
QUESTION = '{"id": "1", "question": "who?", "golden_answers": ["ann"]}\n'
PASSAGE = '{"id": "1", "contents": "Title\\ntext"}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, questions, a corpus with its index, and files that are wrong."""
    folder = tmp_path_factory.mktemp("mistakes")
    agent_policy().save_pretrained(folder / "policy")
    agent_tokenizer().save_pretrained(folder / "policy")
    (folder / "empty").mkdir()
    for name, text in {
        "questions.jsonl": QUESTION,
        "corpus.jsonl": PASSAGE,
        "broken.jsonl": "{\n",
        "misspelt.yaml": RECIPE.read_text() + "learn_rate: 1.0\n",
    }.items():
        (folder / name).write_text(text)
    return folder


def check(
    main: Callable[[Sequence[str]], None],
    words: list[str],
    said: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert run_command(main, words) == 2
    shown = capsys.readouterr()
    line = shown.err.splitlines()[-1]  # libraries show progress before
    assert line.startswith("error: ") and said in line
    assert "Traceback" not in shown.err
    assert "usage:" not in shown.err
    assert shown.out == ""
    assert sorted(folder.rglob("*")) == before, "nothing is half-written"


TRAIN = ["--train_questions", "questions.jsonl", "--corpus", "corpus.jsonl", "--model_name_or_path", "policy"]
TRAIN += ["--output_dir", "out", "--use_cpu", "--bf16=false", "--max_steps=1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: --train_questions"),
        (
            ["--config", "misspelt.yaml", *TRAIN],
            "`--learn_rate` is no argument of sorl train --trainer so_grpo; is it `--learning_rate`?",
        ),
        (["--config", str(RECIPE)], "`train_questions` is 'runs/quickstart/world/train.jsonl', but there is no such"),
        (
            [*TRAIN, "--num_proc", "2"],
            "`--num_proc` is no argument of sorl train --trainer so_grpo; is it `--num_processes`?",
        ),
        ([*TRAIN, "--num_generations", "7"], "must be divisible by num_generations (7)"),
        (
            [*TRAIN, "--model_name_or_path", "/no/such"],
            "`model_name_or_path` is '/no/such', but there is no such folder",
        ),
        ([*TRAIN, "--model_name_or_path", "empty"], "`model_name_or_path` is 'empty', which cannot be loaded: "),
        ([*TRAIN, "--train_questions", "broken.jsonl"], "broken.jsonl, line 1: not JSON"),
        ([*TRAIN, "--index", "empty", "--corpus", ""], "index empty: there is no manifest.json"),
        (
            [*TRAIN, "--resume_from_checkpoint", "empty"],
            "`resume_from_checkpoint` is 'empty', but empty is no whole checkpoint",
        ),
    ],
)
def test_train(
    words: list[str],
    said: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(train.main, words, said, folder, capsys, monkeypatch)


EVALUATE = ["--model_name_or_path", "policy", "--questions", "questions.jsonl", "--no_search", "--output"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--limit", "1"], "the following arguments are required: --model_name_or_path"),
        ([*EVALUATE, "run", "--model_name_or_path", "no/such"], "`model_name_or_path` is 'no/such', but there is no"),
        ([*EVALUATE, "questions.jsonl"], "File exists: 'questions.jsonl'"),
    ],
)
def test_evaluate(
    words: list[str],
    said: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(evaluate.main, words, said, folder, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "questions.jsonl"], "questions.jsonl is a file; name a directory."),
        (["--output", "policy"], "policy holds something else than a quickstart; name another directory."),
    ],
)
def test_quickstart(
    words: list[str],
    said: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(quickstart.main, words, said, folder, capsys, monkeypatch)
