"""Engines by name: what is built is opened again by what its manifest says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from sorl_trl.command_line import run_command
from sorl_trl.search import BM25Index
from sorl_trl.search.engines.choice import ENGINES, build_index, open_index
from sorl_trl.search.engines.dense import DenseIndex
from sorl_trl.search.engines.encoder import DenseOptions
from sorl_trl.search.engines.tantivy import TantivyIndex
from sorl_trl.search.index import main


@pytest.mark.parametrize("engine", ["bm25", "tantivy", "dense"])
def test_what_is_built_by_name_is_opened_without_it(corpus_path, embedder, tmp_path, engine):
    dense = DenseOptions(model=str(embedder), device="cpu") if engine == "dense" else None
    built = build_index(engine, corpus_path, tmp_path / "index", dense, show_progress=False)
    opened = open_index(tmp_path / "index")
    assert type(built) is type(opened) is ENGINES[engine]
    assert built.identity == opened.identity
    assert len(built) == len(opened) == 7
    assert built.search_batch(["capital of France"], 2) == opened.search_batch(["capital of France"], 2)


def test_engines_are_named_as_in_their_manifests():
    assert {"bm25": BM25Index, "tantivy": TantivyIndex, "dense": DenseIndex} == ENGINES


def test_an_unknown_engine_is_named(corpus_path, index_dir, tmp_path):
    with pytest.raises(ValueError, match="`engine` is 'faiss', but must be one of 'bm25', 'tantivy', 'dense'"):
        build_index("faiss", corpus_path, tmp_path / "index")
    strange = shutil.copytree(index_dir, tmp_path / "strange")
    manifest = json.loads((strange / "manifest.json").read_text())
    (strange / "manifest.json").write_text(json.dumps(manifest | {"engine": "faiss"}))
    with pytest.raises(ValueError, match=r"strange: made by the engine 'faiss', known are bm25, tantivy, dense"):
        open_index(strange)


def test_options_of_another_engine_are_an_error(corpus_path, tmp_path):
    with pytest.raises(ValueError, match="dense must be None for the engine 'bm25', got DenseOptions"):
        build_index("bm25", corpus_path, tmp_path / "index", DenseOptions())


def test_what_is_no_index_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"index_dir .*nowhere is not a directory"):
        open_index(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"there is none, for manifest\.json is missing; name another"):
        open_index(tmp_path)


def run(*arguments: object) -> int:
    return run_command(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("engine", ["bm25", "tantivy"])
def test_the_command_line_says_what_it_made(corpus_path, tmp_path, capsys, engine):
    output = tmp_path / "deep/index"
    assert run("--corpus", corpus_path, corpus_path, "--output", output, "--engine", engine) == 0
    shown = capsys.readouterr()
    index = open_index(output)
    assert shown.out.startswith("14 passages, ")
    assert shown.out.endswith(f"B, in {output} ({index.identity})\n")
    assert "Reading passages" in shown.err


def test_the_command_line_hands_the_options_of_the_model_on(corpus_path, embedder, tmp_path):
    options = (
        "--model",
        embedder,
        "--query-prefix",
        "q ",
        "--passage-prefix",
        "",
        "--batch-size",
        2,
        "--device",
        "cpu",
    )
    assert run("--corpus", corpus_path, "--output", tmp_path / "index", "--engine", "dense", *options) == 0
    settings = json.loads((tmp_path / "index/manifest.json").read_text())["settings"]
    assert settings == {"model": str(embedder), "query_prefix": "q ", "passage_prefix": ""}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "nowhere.jsonl"], r"nowhere\.jsonl: there is no such file or folder: check the name"),
        (["--corpus", "broken.jsonl"], r"broken\.jsonl, line 2: not JSON .*"),
        (["--corpus", "empty.jsonl"], r"empty\.jsonl: the corpus is empty; .*"),
        (["--corpus", "folder"], r"folder: the folder holds no file .*"),
        (["--corpus", "silent.jsonl"], r"corpus_path silent\.jsonl: no passage holds .*"),
        (["--corpus", "silent.jsonl", "--output", "folder"], r"index_dir folder exists; .*"),
        (["--corpus", "silent.jsonl", "--batch-size", "3"], "--batch-size: only for --engine dense, .* bm25"),
        (
            ["--corpus", "silent.jsonl", "--engine", "dense", "--batch-size", "0"],
            "`batch_size` is 0, but must be a whole number, at least 1.*",
        ),
        (["--corpus", "silent.jsonl", "--engine", "dense", "--model", "nowhere"], "model must be .* got 'nowhere' .*"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, monkeypatch, capfd, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    Path("broken.jsonl").write_text('{"id": 1, "contents": "T\\nt"}\n{\n')
    Path("silent.jsonl").write_text('{"id": 1, "contents": "?\\n!"}\n')
    Path("folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert run("--output", "index", *arguments) == 2
    shown = capfd.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert re.fullmatch(f"error: {message}", lines[0])
    assert shown.err.endswith(f"{lines[0]}\n")
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unknown_engine_on_the_command_line_is_refused(capsys):
    assert run("--corpus", "c.jsonl", "--output", "index", "--engine", "faiss") == 2
    assert "invalid choice: 'faiss'" in capsys.readouterr().err
