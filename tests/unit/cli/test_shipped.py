"""The files that ship with the package: which there are, how they are named, listed and copied out."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from sorl_trl.cli.main import main
from sorl_trl.cli.shipped import CONFIGS, PACKAGE, RECIPES, Shipped, deepspeed_file, with_recipe
from sorl_trl.command_line import ADVICE, UserMistake

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_the_package_ships_all_files_of_both_folders() -> None:
    """What pyproject.toml takes into a wheel, but for the page that describes the recipes."""
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    globs = settings["package-data"]["sorl_trl"]
    taken = {path.relative_to(PACKAGE) for glob in globs for path in PACKAGE.glob(glob)}
    folders = [path for each in (RECIPES, CONFIGS) for path in (ROOT / each.folder).iterdir()]
    assert len(folders) > 30
    files = {path.relative_to(ROOT) for path in folders if path.name != "README.md"}
    assert taken == files | {Path("py.typed")}


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

    def test_one_is_copied_out_once(
        self, command: str, ours: Shipped, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        name, own = next(iter(ours.paths)), tmp_path / "own.yaml"
        assert main([command, name, "-o", str(own)]) == 0
        assert own.read_text() == (ROOT / ours.folder / f"{name}.yaml").read_text()
        assert not own.is_symlink()
        assert capsys.readouterr().out == f"{own}\n"
        own.write_text("mine\n")
        assert main([command, name, "-o", str(own)]) == 2
        assert capsys.readouterr().err == f"error: {own}: there is a file of this name: name another place\n"
        assert own.read_text() == "mine\n"

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["nope"], "'nope' is the name of no "),
            (["-o", "x.yaml"], "--output goes with the name of one "),
        ],
    )
    def test_mistakes(
        self, command: str, ours: Shipped, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([command, *words]) == 2
        assert capsys.readouterr().err.startswith(f"error: {said}{ours.kind}")

    def test_a_folder_that_is_missing(
        self, command: str, ours: Shipped, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([command, next(iter(ours.paths)), "-o", str(tmp_path / "no/own.yaml")]) == 2
        assert capsys.readouterr().err == f"error: {tmp_path}/no/own.yaml: {ADVICE[errno.ENOENT]}\n"


class TestFind:
    def test_a_file_of_the_users_goes_before_ours(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert RECIPES.find("grpo") == PACKAGE / "recipes/grpo.yaml"
        (tmp_path / "grpo").mkdir()  # such as what a training leaves
        assert RECIPES.find("grpo") == PACKAGE / "recipes/grpo.yaml"
        (tmp_path / "grpo").rmdir()
        (tmp_path / "grpo").touch()
        assert RECIPES.find("grpo") == Path("grpo")

    @pytest.mark.parametrize(
        ("name", "hint"), [("zero8", "; is it `zero3`?"), ("x/y.yaml", " (`sorl configs` lists them)")]
    )
    def test_neither(self, name: str, hint: str) -> None:
        with pytest.raises(UserMistake) as error:
            CONFIGS.find(name)
        assert str(error.value).startswith(f"--accelerate_config: {name!r} is neither a file nor the name of one of")
        assert str(error.value).endswith(hint)

    def test_every_config_of_a_command_line(self) -> None:
        grpo = str(PACKAGE / "recipes/grpo.yaml")
        assert with_recipe(["--seed", "1", "--config=grpo"]) == ["--seed", "1", "--config", grpo]
        assert with_recipe(["--config", "grpo", "--seed", "1"]) == ["--config", grpo, "--seed", "1"]
        assert with_recipe(["--seed", "1"]) == ["--seed", "1"]


class TestDeepspeedFile:
    @pytest.mark.parametrize("name", ["zero3_cpu", "zero3_two_machines_cpu"])
    def test_beside_the_config_unless_it_is_where_the_path_points(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(ROOT)
        assert deepspeed_file(CONFIGS.get(name)) is None
        monkeypatch.chdir(tmp_path)
        assert deepspeed_file(CONFIGS.get(name)) == PACKAGE / "accelerate_configs/zero3_cpu.json"

    def test_most_configs_have_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        found = {name for name, path in CONFIGS.paths.items() if deepspeed_file(path)}
        assert found == {"zero3_cpu", "zero3_two_machines_cpu"}

    def test_it_is_copied_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["configs", "zero3_cpu", "-o", "own.yaml"]) == 0
        assert capsys.readouterr().out == "own.yaml\nzero3_cpu.json\n"
        copied = deepspeed_file(Path("own.yaml"))
        assert copied == Path("zero3_cpu.json")
        assert copied.read_text() == (ROOT / "accelerate_configs/zero3_cpu.json").read_text()
        assert main(["configs", "zero3_cpu", "-o", "second.yaml"]) == 0
        assert capsys.readouterr().out == "second.yaml\n", "the JSON file is there already"
        copied.write_text("{}")
        assert main(["configs", "zero3_cpu", "-o", "other.yaml"]) == 2
        assert "copy into another folder" in capsys.readouterr().err
        assert not Path("other.yaml").exists(), "nothing is half-written"
        assert copied.read_text() == "{}"

    @pytest.mark.parametrize("text", ["- a\n", "a\n", "deepspeed_config: 1\n", "deepspeed_config: {}\n", ""])
    def test_files_of_another_shape_have_none(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text(text)
        assert deepspeed_file(tmp_path / "config.yaml") is None
