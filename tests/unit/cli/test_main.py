"""The console command: its help, its subcommands, and what it says of mistakes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from sorl_trl.cli.main import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_under_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):  # as argparse ends after help
        assert main([name, "--help"]) == 0
    assert f"usage: sorl {name} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fly"], "'fly' is no command of sorl (--help lists the commands)"),
        (["--versoin"], "`--versoin` is no argument of sorl; is it `--version`? (--help lists the arguments)"),
        (["index", "--corp", "x"], "`--corp` is no argument of sorl index; is it `--corpus`?"),
        (["evaluate", "--protocl", "x"], "`--protocl` is no argument of sorl evaluate; is it `--pro"),
        (["compare", "a"], "the following arguments are required: AFTER"),
        (["compare", "a", "b"], "a does not exist: name the folder of a run"),
        (["evaluate"], "sorl evaluate needs the folder of a run"),
        (["evaluate", "a"], "a does not exist: name the folder of a run"),
        (["evaluate", "--model_name_or_path=no/such", "--output=run"], "`model_name_or_path` is 'no/such'"),
        (["evaluate", "empty"], "empty holds no policy: name the folder of a run"),
        (["evaluate", "policy", "--output", "policy"], "`output` is 'policy', which holds a policy: name a folder"),
        (["evaluate", "policy", "--questions", "a"], "`questions` is 'a', but there is no such file or folder"),
        (["evaluate", "empty", "--model_name_or_path", "policy"], "empty holds no recipe.yaml"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("policy").mkdir()
    Path("policy/config.json").touch()
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {said}")
    assert len(shown.err.splitlines()) == 1
