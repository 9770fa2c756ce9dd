"""`train.py` in this process: where it searches, and where its questions come from."""

from __future__ import annotations

import json
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from sorl_trl import SOGRPOTrainer
from sorl_trl.cli import evaluate
from sorl_trl.cli.arguments import Arguments, parse_arguments
from sorl_trl.cli.build import load_prompts
from sorl_trl.cli.train import main
from sorl_trl.command_line import run_command
from sorl_trl.rollout.engines.vllm import EngineUnavailable
from tests.interrupts import make_world, training_words
from tests.unit.rollout.fakes import bpe_tokenizer
from tests.unit.search.servers import Reply, Server

QUESTION = {"id": "q", "question": "rome", "golden_answers": ["rome"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random policy that searches now and then, and eight questions."""
    make_world(tmp_path)
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(folder: Path, *words: str, **changed: Any) -> Arguments:
    """Two steps of the recipe for SO-GRPO."""
    own = {"corpus": None, "per_device_train_batch_size": None, "max_steps": 2, "disable_tqdm": "true"}
    return parse_arguments([*training_words(folder, **{**own, **changed}), *words])


def test_a_policy_that_has_lost_its_numbers_is_not_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_world(tmp_path)
    changed = {"collapse_guard": "stop", "learning_rate": 1e38, "target_kl": 0.0, "steps_per_generation": 4}
    assert run_command(main, training_words(tmp_path, **changed)) == 2
    assert "no policy was saved" in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()


def fails(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """The one line with which training fails."""
    assert run_command(main, words) == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return shown.err.splitlines()[-1]


def test_a_run_that_fails_before_its_first_step_leaves_its_folder_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as one whose engine is gone; and one that has trained does not."""

    def gone(self: Any, *_: Any) -> None:
        raise EngineUnavailable("connection refused. Resume from out/checkpoint-3.")

    words = [*training_words(folder, corpus=None, per_device_train_batch_size=None, max_steps=2), "--no_search"]
    with monkeypatch.context() as patch:
        patch.setattr(SOGRPOTrainer, "training_step", gone)
        assert fails(capsys, words) == "error: connection refused. Resume from out/checkpoint-3."
    assert run_command(main, words) == 0
    assert "`output_dir`" in fails(capsys, words)


def test_a_url_that_is_no_search_servers_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"corpus": None, "per_device_train_batch_size": None, "max_steps": 2}
    with closing(Server()) as server:
        server.reply = lambda request: Reply(b"no such page", status=404)
        line = fails(capsys, training_words(folder, **told, search_url=server.url))
    assert line.startswith(f"error: {server.url}: HTTP 404")


def test_what_does_not_fit_is_refused_before_a_corpus_is_indexed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = deepcopy(bpe_tokenizer())
    tokenizer.chat_template = "hello"
    tokenizer.save_pretrained(folder / "policy")
    told = {"corpus": folder / "corpus.jsonl", "chat": "true", "per_device_train_batch_size": None, "max_steps": 2}
    assert "the chat template renders 'hello'" in fails(capsys, training_words(folder, **told))
    shown = ("--questions", "train.jsonl"), ("--corpus", "corpus.jsonl")
    words = [word for option, name in shown for word in (option, str(folder / name))]
    assert run_command(evaluate.main, [str(folder / "policy"), *words, "--chat", "--output", str(folder / "out")]) == 2
    assert "the chat template renders 'hello'" in capsys.readouterr().err
    assert not (folder / "corpus.jsonl.index").exists()


def test_the_questions_to_evaluate_on_are_a_fixed_spread_of_all(folder: Path) -> None:
    """The first two of five would be one set's alone where a file joins sets."""
    write(folder / "eval.jsonl", [{**QUESTION, "id": name, "question": name} for name in "abcde"])
    told = {"eval_questions": folder / "eval.jsonl", "eval_strategy": "epoch", "eval_limit": 2}
    found = arguments(folder, "--no_search", **told)
    trained, evaluated = load_prompts(found)
    assert evaluated is not None
    assert [row["prompt"] for row in evaluated] == [f"where {name}" for name in "ac"]
    assert len(trained) == 8, "all are trained on"
