from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sorl_trl.command_line import run_command
from sorl_trl.search import open_index
from sorl_trl.search.index import main


def run(*arguments: object) -> int:
    return run_command(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("engine", ["bm25", "tantivy"])
def test_the_command_line_says_what_it_made(
    corpus_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    output = tmp_path / "deep/index"
    assert run("--corpus", corpus_path, corpus_path, "--output", output, "--engine", engine) == 0
    shown = capsys.readouterr()
    index = open_index(output)
    assert shown.out.startswith("14 passages, ")
    assert shown.out.endswith(f"B, in {output} ({index.identity})\n")
    assert "Reading passages" in shown.err


def test_the_command_line_hands_the_options_of_the_model_on(corpus_path: Path, embedder: Path, tmp_path: Path) -> None:
    options = ("--model", embedder, "--query_prefix", "q ", "--passage_prefix", "", "--batch_size", 2)
    arguments = ("--corpus", corpus_path, "--output", tmp_path / "index", "--engine", "dense", "--device", "cpu")
    assert run(*arguments, *options) == 0
    settings = json.loads((tmp_path / "index/manifest.json").read_text())["settings"]
    assert settings == {"model": str(embedder), "query_prefix": "q ", "passage_prefix": ""}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "nowhere.jsonl"], r"`corpus` is 'nowhere\.jsonl', but there is no such file or folder"),
        (["--corpus", "broken.jsonl"], r"broken\.jsonl, line 2: not JSON .*"),
        (["--corpus", "silent.jsonl"], "corpus: no passage holds .*"),
        (["--corpus", "silent.jsonl", "--output", "folder"], r"index_dir folder exists; .*"),
        (["--corpus", "silent.jsonl", "--batch_size", "3"], "--batch_size: only for --engine dense, .* bm25"),
        (["--corpus", "silent.jsonl", "--engine", "dense", "--model", "nowhere"], "model must be .* got 'nowhere' .*"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.jsonl").write_text('{"id": 1, "contents": "T\\nt"}\n{\n')
    Path("silent.jsonl").write_text('{"id": 1, "contents": "?\\n!"}\n')
    Path("folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert run("--output", "index", *arguments) == 2
    shown = capfd.readouterr()
    [line] = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(f"error: {message}", line)
    assert shown.err.endswith(f"{line}\n")
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert sorted(tmp_path.rglob("*")) == before
