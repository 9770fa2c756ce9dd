"""The files that ship with the package: which there are, how they are named, listed and printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sorl_trl.cli.main import main
from sorl_trl.shipped import CONFIGS, PACKAGE, RECIPES, Shipped

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_the_package_ships_all_files_of_both_folders() -> None:
    """What pyproject.toml takes into a wheel, but for the page that describes the recipes."""
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    globs = settings["package-data"]["sorl_trl"]
    taken = {path.relative_to(PACKAGE) for glob in globs for path in PACKAGE.glob(glob)}
    files = {path.relative_to(ROOT) for each in (RECIPES, CONFIGS) for path in (ROOT / each.folder).iterdir()}
    assert len(files) > 10
    assert taken == files - {Path("recipes/README.md")} | {Path("py.typed")}


@pytest.mark.parametrize(("command", "ours"), [("recipes", RECIPES), ("configs", CONFIGS)])
class TestCommands:
    def test_all_are_listed_with_a_sentence(
        self, command: str, ours: Shipped, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([command]) == 0
        lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
        found = {name: sentence for name, _, sentence in (line.partition("  ") for line in lines)}
        assert [*found] == sorted(path.stem for path in (ROOT / ours.folder).glob("*.yaml"))
        assert [s for s in found.values() if len(s) < 20 or not s.endswith(".") or "#" in s] == []

    def test_one_is_printed(self, command: str, ours: Shipped, capsys: pytest.CaptureFixture[str]) -> None:
        name = next(iter(ours.paths))
        assert main([command, name]) == 0
        assert capsys.readouterr().out == (ROOT / ours.folder / f"{name}.yaml").read_text()

    def test_none_of_that_name(self, command: str, ours: Shipped, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([command, "nope"]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith(f"error: sorl {command}: 'nope' is neither a file nor the name of one of our ")


def test_a_file_of_the_users_goes_before_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RECIPES.find("so_grpo") == PACKAGE / "recipes/so_grpo.yaml"
    (tmp_path / "so_grpo").mkdir()  # such as what a training leaves
    assert RECIPES.find("so_grpo") == PACKAGE / "recipes/so_grpo.yaml"
    (tmp_path / "so_grpo").rmdir()
    (tmp_path / "so_grpo").touch()
    assert RECIPES.find("so_grpo") == Path("so_grpo")
