"""The console command: its help, its subcommands, what it lists, and how it reports mistakes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from sorl_trl.cli.main import COMMANDS, main
from sorl_trl.command_line import CONFIGS, RECIPES, Shipped

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_under_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):  # as argparse ends after help
        assert main([name, "--help"]) == 0
    assert f"usage: sorl {name} " in capsys.readouterr().out


@pytest.mark.trains
def test_what_is_asked_at_the_keyboard_is_answered_before_anything_heavy_is_imported() -> None:
    """The help of most commands, and wrong paths: imports would take seconds."""
    quick = [[], *([name, "--help"] for name in COMMANDS if name not in ("quickstart", "evaluate"))]
    wrong = [["train", "--config", "nope"], ["evaluate", "nope"], ["compare", "nope", "nope"]]
    wrong += [
        ["evaluate", "--limit", "3"],
        ["view", "nope"],
        ["index", "--corpus", "nope", "--output", "x"],
        ["serve", "--index", "nope"],
    ]
    code = (
        "import sys\nfrom sorl_trl.cli.main import main\n"
        f"for words in {[*quick, *wrong]}:\n"
        "    try:\n        main(words)\n    except SystemExit:\n        pass\n"
        "heavy = {'torch', 'transformers', 'trl', 'accelerate', 'datasets'} & {*sys.modules}\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["fly"], "'fly'"),
        (["vew"], "did you mean view?"),
        (["train", "--config", "so_gpro"], "did you mean so_grpo?"),
        (["index", "--corpus", "a", "--outptu", "b"], "--outptu: did you mean --output?"),
        (["evaluate", "policy", "--limt", "3"], "--limt: did you mean --limit?"),
        (["evaluate", "policy", "--xyz", "3"], "unrecognized arguments: --xyz"),
        (["evaluate", "--questions", "a"], "the folder of a run"),
        (["compare", "a"], "AFTER"),
        (["compare", "a", "b"], "a does not exist"),
        (["recipes", "nope"], "'nope'"),
        (["evaluate"], "the folder of a run"),
        (["evaluate", "a"], "a does not exist"),
        (["evaluate", "--model_name_or_path=no/such/run", "--output=run"], "`model_name_or_path` is 'no/such/run'"),
        (["evaluate", "empty"], "empty contains no policy"),
        (["evaluate", "policy", "--output", "policy"], "`output` is 'policy'"),
        (["evaluate", "policy", "--questions", "a"], "`questions` is 'a'"),
        (["evaluate", "empty", "--model_name_or_path", "policy"], "empty has no recipe.yaml"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("policy").mkdir()
    Path("policy/config.json").touch()
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ") and named in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(("command", "ours"), [("recipes", RECIPES), ("configs", CONFIGS)])
def test_what_ships_is_listed_and_printed(command: str, ours: Shipped, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted((ROOT / ours.folder).glob("*.yaml"))
    assert main([command]) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert [line.partition("  ")[0] for line in lines] == [path.stem for path in files]
    assert all(len(line.partition("  ")[2]) > 20 for line in lines)
    assert main([command, files[0].stem]) == 0
    assert capsys.readouterr().out == files[0].read_text()
