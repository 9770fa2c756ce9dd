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
        "list.yaml": "- a\n",
        "broken.yaml": "a: [1\nb: 2\n",
        "odd_key.yaml": "1: 2\n",
        "misspelt.yaml": RECIPE.read_text() + "learn_rate: 1.0\n",
        "no_number.yaml": RECIPE.read_text() + "gamma: null\n",
        "letters.yaml": RECIPE.read_text() + "max_turns: two\n",
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
        (["--config"], "argument --config: expected one argument"),
        (["--config", "nowhere.yaml"], "--config: 'nowhere.yaml' is neither a file nor the name of one of"),
        (["--config=nowhere.yaml"], "--config: 'nowhere.yaml' is neither a file nor the name of one of"),
        (["--config", "empty"], "--config: 'empty' is neither a file nor the name of one of our recipes"),
        (["--config", "list.yaml"], "list.yaml must contain a YAML mapping"),
        (["--config", "broken.yaml"], "expected ',' or ']', but got ':'"),
        (["--config", "odd_key.yaml"], "odd_key.yaml must contain a YAML mapping of arguments"),
        (
            ["--config", "misspelt.yaml", *TRAIN],
            "`--learn_rate` is no argument of sorl train --trainer so_grpo; is it `--learning_rate`?",
        ),
        (["--config", "no_number.yaml", *TRAIN], "`gamma` is None, but must be in [0, 1]"),
        (["--config", "letters.yaml", *TRAIN], "argument --max_turns/--max-turns: invalid int value: 'two'"),
        (["--config", str(RECIPE)], "`train_questions` is 'runs/quickstart/world/train.jsonl', but there is no such"),
        (
            [*TRAIN, "--learning_rat", "1"],
            "`--learning_rat` is no argument of sorl train --trainer so_grpo; is it `--learning_rate`?",
        ),
        (
            [*TRAIN, "--num_proc", "2"],
            "`--num_proc` is no argument of sorl train --trainer so_grpo; is it `--num_processes`?",
        ),
        ([*TRAIN, "--learningrate", "1"], "is no argument of sorl train --trainer so_grpo; is it `--learning_rate`?"),
        ([*TRAIN, "--gae_lambda", "1"], "`--gae_lambda` is no argument of sorl train --trainer so_grpo"),
        ([*TRAIN, "stray"], "'stray' belongs to no argument of sorl train"),
        ([*TRAIN, "--learning_rate", "fast"], "invalid float value: 'fast'"),
        ([*TRAIN, "--trainer"], "argument --trainer: expected one argument"),
        ([*TRAIN, "--trainer", "ppo"], "`trainer` is 'ppo', but must be one of 'so_grpo', 'so_ppo'"),
        ([*TRAIN, "--num_generations", "7"], "must be divisible by num_generations (7)"),
        (
            [*TRAIN, "--model_name_or_path", "/no/such"],
            "`model_name_or_path` is '/no/such', but there is no such folder",
        ),
        ([*TRAIN, "--model_name_or_path", "empty"], "`model_name_or_path` is 'empty', which cannot be loaded: "),
        ([*TRAIN, "--model_name_or_path", "no/such"], "`model_name_or_path` is 'no/such', but there is no such"),
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
        ([], "sorl evaluate needs the folder of a run"),
        (["--limit", "1"], "the following arguments are required: --model_name_or_path"),
        (["--config", "nowhere.yaml"], "--config: 'nowhere.yaml' is neither a file nor the name of one of"),
        ([*EVALUATE, "run", "--protocl", "terse"], "`--protocl` is no argument of sorl evaluate; is it `--protocol`?"),
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


def test_a_run_that_could_not_load_its_model_binds_nobody(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    words = [*EVALUATE, str(tmp_path / "run"), "--model_name_or_path"]
    assert run_command(evaluate.main, [*words, "no/such"]) == 2
    assert "`model_name_or_path` is 'no/such', but there is no such folder; the Hub's cache" in capsys.readouterr().err
    assert run_command(evaluate.main, [*words, "./nowhere"]) == 2
    assert "`model_name_or_path` is './nowhere', but there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--wrld", "atlas"], "`--wrld` is no argument of sorl quickstart"),
        (["--max-steps", "0"], "argument --max-steps: must be a whole number of at least 1, got '0'"),
        (["--output", "questions.jsonl"], "Not a directory: '"),
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
