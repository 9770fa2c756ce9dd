"""The console command: its help, its subcommands, and what it says of mistakes."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from sorl_trl.cli.main import COMMANDS, main
from sorl_trl.cli.shipped import PACKAGE
from sorl_trl.command_line import Parser, run_command
from sorl_trl.search import index


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_help_lists_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(words)
    except SystemExit as done:  # as argparse ends after help
        code = int(done.code or 0)
    shown = capsys.readouterr().out
    assert code == 0
    assert shown.startswith("usage: sorl COMMAND [ARGUMENTS]")
    assert [name for name in COMMANDS if f"\n  {name} " not in shown] == []


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert not done.value.code
    assert capsys.readouterr().out == f"sorl-trl {version('sorl-trl')}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_under_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    assert not done.value.code
    assert f"usage: sorl {name} [-h]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian", "--config", "x"], "'trian' is no command of sorl; is it `train`? (--help lists the commands)"),
        (["fly"], "'fly' is no command of sorl (--help lists the commands)"),
        (["--versoin"], "`--versoin` is no argument of sorl; is it `--version`? (--help lists the arguments)"),
        (["--debug", "fly"], "'fly' is no command of sorl (--help lists the commands)"),
        (["index", "--corpse", "x"], "`--corpse` is no argument of sorl index; is it `--corpus`? (--help"),
        (["evaluate", "--protocl", "x"], "`--protocl` is no argument of sorl evaluate; is it `--protocol`? (--help"),
        (["compare", "a"], "the following arguments are required: RUN"),
        (["compare", "a", "b"], "a is not the directory of a finished run: it has no results"),
        (
            ["doctor", "--config", "so_grop"],
            "--config: 'so_grop' is neither a file nor the name of one of our recip",
        ),
        (["train", "--config", "so_grop"], "--config: 'so_grop' is neither a file nor the name of one of our recip"),
        (["train", "--config"], "`--config` is the last word, but must be followed by a YAML file"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith(f"error: {said}")
    assert ("Traceback" in shown.err) == ("--debug" in words)
    assert len(shown.err.splitlines()) == 1 or "--debug" in words


def test_a_command_is_called_so_only_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "--corpse", "x"]) == 2
    assert Parser(prog="tool").prog == "tool"
    assert run_command(index.main, ["--corpse", "x"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "of sorl index;" in first
    assert "of python -m sorl_trl.search.index;" in second


def test_a_recipe_may_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its paths start where the command is run, where there is nothing: the doctor says so."""
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--config", "so_grpo"]) == 1
    shown = capsys.readouterr().out
    assert "`train_questions` is 'runs/quickstart/world/train.jsonl', but there is no such file" in shown
    assert "recipes/so_grpo.yaml line 3" in shown


def test_debug_reaches_the_processes_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("sorl_trl.cli.launch.main", lambda words: seen.append(list(words)))
    assert main(["train", "--seed", "1", "--debug"]) == 0
    assert main(["--debug", "train", "--config", "so_grpo"]) == 0
    recipe = str(PACKAGE / "recipes/so_grpo.yaml")
    assert seen == [["--seed", "1", "--debug"], ["--config", recipe, "--debug"]]


@pytest.mark.parametrize("script", ["train", "evaluate", "quickstart"])
def test_a_script_of_the_repository_is_the_same_command(script: str) -> None:
    assert import_module(script).main is import_module(f"sorl_trl.cli.{script}").main


def test_the_page_of_commands_has_all_of_them_with_an_example() -> None:
    page = (Path(__file__).parents[3] / "docs/commands.md").read_text()
    headings = [heading for heading in re.findall(r"^## (.*)$", page, flags=re.MULTILINE) if "sorl" in heading]
    assert re.findall(r"sorl (\w+)", " ".join(headings)) == [*COMMANDS]
    examples = re.findall(r"^sorl (\w+)", page, flags=re.MULTILINE)
    assert list(dict.fromkeys(examples)) == [*COMMANDS]
    assert re.findall(r"^\| \[`sorl (\w+)`\]", page, flags=re.MULTILINE) == [*COMMANDS]
