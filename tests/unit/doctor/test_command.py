"""The command line: what it prints, and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sorl_trl.command_line import run_command
from sorl_trl.methods import Method
from sorl_trl.doctor import Finding, format_findings
from sorl_trl.doctor.__main__ import main
from tests.unit.doctor.recipes import write_recipe


@pytest.mark.trains
def test_a_process_of_its_own(tmp_path: Path) -> None:
    """A shipped recipe, with the paths that a fresh clone lacks."""
    root, here = Path(__file__).parents[3], write_recipe(tmp_path)
    words = ["--config", str(root / "recipes/quickstart.yaml"), "--train_questions", str(tmp_path / "train.jsonl")]
    words += ["--corpus", str(tmp_path / "corpus.jsonl"), "--model_name_or_path", str(here.parent / "model"), "--json"]
    run = subprocess.run([sys.executable, "-m", "sorl_trl.doctor", *words], capture_output=True, text=True)
    report = json.loads(run.stdout)
    wrong = {f["check"]: f["what"] for f in report["findings"] if f["level"] in ("error", "warning")}
    assert wrong.keys() == {"batches", "tokens"}, run.stderr
    assert wrong["batches"].startswith("`train_questions` has 8 prompts, but a rollout takes 16")
    assert run.returncode == 1


def test_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, num_iterations=8, method=Method(), target_kl=0)
    assert main(["--config", str(recipe)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("warning  method     16 updates per rollout")
    assert shown[1] == f"{'':20}-> target_kl: 0.005  ({recipe} line 22)"
    assert shown[2].startswith("ok       model      llama, 17 tokens")
    assert shown[-1].startswith("error: 0, warning: 1, skipped: 0, ok: ")


def test_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, num_generations=16, steps_per_generation=1)
    assert main(["--config", str(recipe)]) == 1
    assert "does not hold whole groups of 16" in capsys.readouterr().out
    assert main(["--config", str(recipe), "--num_processes", "2"]) == 0
    assert "16 trajectories per rollout: 1 questions x 16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: --config"),
        (["--config", "r.yaml", "--num_processes", "0"], "at least 1, got '0'"),
        (["--config", "nowhere.yaml"], "--config: nowhere.yaml: there is no such file or folder"),
    ],
)
def test_a_wrong_command_line_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(main, words) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert said in shown.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\nbeta: [1\n", "recipe.yaml line 3: "),
        ("- seed\n", "recipe.yaml must be a YAML mapping from arguments to values"),
        ("1: 2\n", "recipe.yaml line 1: a key must be the name of an argument, which this is not"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    assert run_command(main, ["--config", str(tmp_path / "recipe.yaml"), "--json"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith("error: --config: ") and said in shown.err


def test_the_worst_comes_first() -> None:
    findings = [
        Finding("ok", "fine", check="a"),
        Finding("error", "bad", "x: 1", "b"),
        Finding("warning", "so", "", "c"),
    ]
    assert format_findings(findings).splitlines() == [
        "error    b  bad",
        "            -> x: 1",
        "warning  c  so",
        "ok       a  fine",
        "",
        "error: 1, warning: 1, skipped: 0, ok: 1",
    ]
