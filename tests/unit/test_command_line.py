"""What a command says of a mistake, and which errors are none of the user's."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sorl_trl.command_line import (
    PACKAGE,
    RECIPES,
    UserMistake,
    check_checkpoint,
    mistakes,
    parse_dataclasses,
    read_config,
    run_command,
    take_config,
)


def raising(error: BaseException, building: bool = False) -> Callable[[Sequence[str]], None]:
    def main(words: Sequence[str]) -> None:
        if building:
            with mistakes():
                raise error
        raise error

    return main


class TestRunCommand:
    @pytest.mark.parametrize(
        "error",
        [UserMistake("two\n  lines"), ValueError("two\nlines"), ImportError("two lines")],
    )
    def test_a_mistake_is_one_line(self, error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command(raising(error, building=True), []) == 2
        assert capsys.readouterr() == ("", "error: two lines\n")

    @pytest.mark.parametrize(
        ("error", "building"),
        [(ValueError("ours"), False), (RuntimeError("ours"), False), (KeyError("ours"), True)],
    )
    def test_a_programming_error_propagates(self, error: Exception, building: bool) -> None:
        """Once everything is built, all but a UserMistake and an OSError are such errors."""
        with pytest.raises(type(error), match="ours"):
            run_command(raising(error, building), [])

    def test_of_several_processes_one_says_what_all_do_wrong_and_each_that_its_disk_is_full(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert run_command(raising(ValueError("wrong"), building=True), []) == 2
        assert capsys.readouterr().err == ""
        assert run_command(raising(OSError(errno.ENOSPC, "No space left on device", "runs/a")), []) == 2
        assert capsys.readouterr().err == "error: [Errno 28] No space left on device: 'runs/a'\n"


@dataclass
class Options:
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"`size` is {self.size}, but must be at least 1.")


@pytest.mark.parametrize(
    ("words", "recipe", "named"),
    [
        (["stray"], {}, "stray"),
        ([], {"sizes": 2}, "--sizes"),
        ([], {"size": "two"}, "--size: .*'two'"),
        (["--size", "0"], {}, "`size` is 0"),
        ([], {"size": [1]}, "wrong kind"),
    ],
)
def test_a_mistake_in_a_recipe_or_a_command_line_is_one_line(
    words: list[str], recipe: dict[str, Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserMistake, match=named):
        parse_dataclasses((Options,), words, recipe, "tool")
    assert capsys.readouterr() == ("", "")


class TestConfig:
    def test_the_file_may_be_joined_to_config(self) -> None:
        assert take_config(["--config=a.yaml", "--seed=1"]) == ("a.yaml", ["--seed=1"])
        assert take_config(["--seed", "1", "--config", "a.yaml"]) == ("a.yaml", ["--seed", "1"])
        assert take_config(["--seed", "1"]) == (None, ["--seed", "1"])

    def test_of_alternatives_the_command_lines_goes_before_the_files(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text("corpus: c.jsonl\nquestions: a.jsonl\nsize: 1\n")
        sources = ("corpus", "search_url", "questions")
        several = ["a.jsonl"]  # as `questions` may be
        assert read_config(path, ["--size", "2"], sources) == {"corpus": "c.jsonl", "questions": several, "size": 1}
        assert read_config(path, ["--search-url=http://x"], sources) == {"size": 1}

    def test_env_goes_to_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OF_THE_FILE", "0")
        (tmp_path / "a.yaml").write_text("env: {OF_THE_FILE: 7}\nsize: 1\n")
        assert read_config(tmp_path / "a.yaml", []) == {"size": 1}
        assert os.environ["OF_THE_FILE"] == "7"

    @pytest.mark.parametrize("text", ["env: [A=1]", "corpus: [c.jsonl]", "- a\n", "a: [1\nb: 2\n", "1: 2\n"])
    def test_a_file_of_another_shape(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(UserMistake, match=r"a\.yaml"):
            read_config(tmp_path / "a.yaml", [])


def test_a_file_of_the_users_goes_before_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "so_grpo").mkdir()  # such as what a training leaves
    assert RECIPES.find("so_grpo") == PACKAGE / "recipes/so_grpo.yaml"
    (tmp_path / "so_grpo").rmdir()
    (tmp_path / "so_grpo").touch()
    assert RECIPES.find("so_grpo") == Path("so_grpo")


@pytest.mark.parametrize("name", ["runs/quickstart/warm-start", "./model"])
def test_a_checkpoint_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserMistake, match=f"`model_name_or_path` is '{name}'"):
        check_checkpoint(name)


def test_an_id_of_the_hub_is_left_to_the_hub_or_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "Qwen/Qwen2.5-3B"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    check_checkpoint(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserMistake, match="HF_HUB_OFFLINE is set"):
        check_checkpoint(name)
    (tmp_path / f"models--{name.replace('/', '--')}").mkdir()
    check_checkpoint(name)
