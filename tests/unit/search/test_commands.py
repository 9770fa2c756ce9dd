"""The command `sorl index`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sorl_trl.cli.main import main
from sorl_trl.search import open_index


def index_command(*arguments: object) -> int:
    return main(["index", *map(str, arguments)])


def test_the_command_line_says_what_it_made(corpus_path, tmp_path, capsys):
    output = tmp_path / "deep/index"
    assert index_command("--corpus", corpus_path, corpus_path, "--output", output, "--engine", "tantivy") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("14 passages, ")
    assert open_index(output).identity in shown.out
    assert "Reading passages" in shown.err


def test_the_command_line_hands_the_options_of_the_model_on(corpus_path, embedder, tmp_path):
    options = ("--model", embedder, "--query_prefix", "q ", "--passage_prefix", "")
    arguments = ("--corpus", corpus_path, "--output", tmp_path / "index", "--engine", "dense")
    assert index_command(*arguments, *options) == 0
    settings = json.loads((tmp_path / "index/manifest.json").read_text())["settings"]
    assert settings == {"model": str(embedder), "query_prefix": "q ", "passage_prefix": ""}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--corpus", "nowhere.jsonl"], "`corpus` is 'nowhere.jsonl'"),
        (["--corpus", "broken.jsonl"], "broken.jsonl, line 2"),
        (["--corpus", "silent.jsonl"], "corpus"),
        (["--corpus", "silent.jsonl", "--output", "folder"], "index_dir"),
        (["--corpus", "silent.jsonl", "--query_prefix", "q "], "--query_prefix"),
        (["--corpus", "silent.jsonl", "--engine", "dense", "--model", "nowhere"], "got 'nowhere'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, monkeypatch, capfd, arguments, named):
    monkeypatch.chdir(tmp_path)
    Path("broken.jsonl").write_text('{"id": 1, "contents": "T\\nt"}\n{\n')
    Path("silent.jsonl").write_text('{"id": 1, "contents": "?\\n!"}\n')
    Path("folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert index_command("--output", "index", *arguments) == 2
    shown = capfd.readouterr()
    [line] = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert named in line
    assert "Traceback" not in shown.err
    assert sorted(tmp_path.rglob("*")) == before
