"""How a command reports a mistake, and which errors are not the user's."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sorl_trl.command_line import (
    UserMistake,
    mistakes,
    parse_dataclasses,
    read_config,
    run_command,
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
        [UserMistake("two\n  lines"), ImportError("two lines"), OSError("two lines")],
    )
    def test_a_mistake_is_one_line(self, error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command(raising(error, building=True), []) == 2
        assert capsys.readouterr() == ("", "error: two lines\n")

    @pytest.mark.parametrize(
        ("error", "building"),
        [
            (ValueError("ours"), False),
            (KeyError("ours"), True),
        ],
    )
    def test_a_programming_error_propagates(self, error: Exception, building: bool) -> None:
        """Once everything is built, all but a UserMistake and an OSError are such errors."""
        with pytest.raises(type(error), match="ours"):
            run_command(raising(error, building), [])

    def test_the_environment_may_ask_for_the_traceback(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("SORL_DEBUG", "1")
        assert run_command(raising(ValueError("wrong"), building=True), []) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("Traceback")
        assert "in main\n" in shown
        assert shown.endswith("\nerror: wrong\n")

    def test_one_process_reports_what_all_do_wrong_and_each_reports_that_its_disk_is_full(
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
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"`size` is {self.size}, but must be at least 1.")


@dataclass
class More:
    share: float = 0.5
    chat: bool = True


def parsed(*words: str, **defaults: Any) -> tuple[list[Any], dict[str, Any]]:
    return parse_dataclasses((Options, More), words, defaults, "tool")


class TestParseDataclasses:
    def test_the_command_line_goes_before_the_recipe_and_that_before_the_defaults(self) -> None:
        assert parsed() == ([Options(), More()], {})
        assert parsed(size=3, names=["a"]) == ([Options(3, ["a"]), More()], {})
        words = ["--size", "2", "--share=0.25", "--no_chat"]
        expected = [Options(2), More(0.25, False)], {"size": 2, "share": 0.25, "chat": False}
        assert parsed(*words, size=3) == expected

    @pytest.mark.parametrize(
        ("words", "recipe", "named"),
        [
            (["--sizes", "2"], {}, "--sizes"),
            ([], {"sizes": 2}, "--sizes"),
            (["--search_engine", "dense"], {}, "--search_engine: it was removed; .*--search_url"),
            ([], {"benchmarks": ["nq"]}, "--benchmarks: it was removed; .*--questions"),
            ([], {"size": "two"}, "--size: .*'two'"),
            (["--size", "0"], {}, "`size` is 0"),
            ([], {"size": [1]}, "wrong type"),
        ],
    )
    def test_a_mistake_is_one_line(
        self, words: list[str], recipe: dict[str, Any], named: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(UserMistake, match=named):
            parsed(*words, **recipe)
        assert capsys.readouterr() == ("", "")


class TestConfig:
    def test_env_goes_to_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OF_THE_FILE", "0")
        (tmp_path / "a.yaml").write_text("env: {OF_THE_FILE: 7}\nsize: 1\n")
        assert read_config(tmp_path / "a.yaml", []) == {"size": 1}
        assert os.environ["OF_THE_FILE"] == "7"

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("env: [A=1]", "`env`"),
            ("model_name_or_path: 5", "`model_name_or_path`"),
            ("a: [1\nb: 2", ""),
            ("1: 2", ""),
        ],
    )
    def test_a_mistake_is_named_with_its_file(self, text: str, named: str, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(UserMistake, match=rf"a\.yaml.*{named}"):
            read_config(tmp_path / "a.yaml", [])
