"""What a command says of a mistake, and which errors are none of the user's."""

from __future__ import annotations

import errno
import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sorl_trl.command_line import (
    ADVICE,
    Parser,
    UserMistake,
    at_least,
    check_checkpoint,
    explain,
    mistakes,
    reading,
    run_command,
    separate_config,
)


def raising(error: BaseException, building: bool = False) -> Callable[[Sequence[str]], None]:
    def main(words: Sequence[str]) -> None:
        if building:
            with mistakes():
                raise error
        raise error

    return main


def led_by(first: OSError) -> Callable[[Sequence[str]], None]:
    def main(words: Sequence[str]) -> None:
        try:
            raise first
        except OSError as error:
            raise RuntimeError("cannot save") from error

    return main


class TestRunCommand:
    @pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (1, 1)])
    def test_the_exit_code_is_that_of_the_command(self, result: int | None, code: int) -> None:
        assert run_command(lambda words: result, []) == code

    def test_the_words_are_those_of_the_command_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[str] = []
        monkeypatch.setattr(sys, "argv", ["train.py", "--debug", "--seed", "1"])
        run_command(seen.extend)
        assert seen == ["--seed", "1"]

    @pytest.mark.parametrize(
        "error",
        [UserMistake("two\n  lines"), ValueError("two\nlines"), ImportError("two lines"), OSError("two lines")],
    )
    def test_a_mistake_is_one_line(self, error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command(raising(error, building=True), []) == 2
        assert capsys.readouterr() == ("", "error: two lines\n")

    @pytest.mark.parametrize(
        "error", [ValueError("ours"), KeyError("ours"), RuntimeError("ours"), ImportError("ours")]
    )
    def test_a_programming_error_propagates_once_everything_is_built(self, error: Exception) -> None:
        with pytest.raises(type(error), match="ours"):
            run_command(raising(error), [])

    @pytest.mark.parametrize("error", [KeyError("ours"), TypeError("ours"), AssertionError("ours")])
    def test_a_programming_error_propagates_while_building(self, error: Exception) -> None:
        with pytest.raises(type(error), match="ours"):
            run_command(raising(error, building=True), [])

    def test_debug_shows_the_traceback_and_the_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command(raising(ValueError("wrong"), building=True), ["--debug"]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("Traceback")
        assert "in main\n" in shown
        assert shown.endswith("\nerror: wrong\n")

    @pytest.mark.parametrize(
        ("words", "left"),
        [
            (["run", "--debug"], ["run"]),
            (["--debug", "run"], ["run"]),
            (["--debug", "underflow_overflow"], ["--debug", "underflow_overflow"]),
        ],
    )
    def test_debug_with_a_value_is_transformers_own(self, words: list[str], left: list[str]) -> None:
        seen: list[str] = []
        run_command(seen.extend, words)
        assert seen == left

    def test_of_several_processes_the_first_says_what_all_do_wrong(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert run_command(raising(ValueError("wrong"), building=True), []) == 2
        assert capsys.readouterr().err == ""
        assert run_command(raising(OSError(errno.ENOSPC, "No space left on device")), []) == 2
        assert "the disk is full" in capsys.readouterr().err, "what one process meets alone is said by it"


class TestExplain:
    @pytest.mark.parametrize("number", ADVICE)
    def test_an_error_of_the_system_says_where_and_what_to_do(self, number: int) -> None:
        error = OSError(number, os.strerror(number), "runs/a")
        assert explain(error) == f"runs/a: {ADVICE[number]}"
        assert ": " in ADVICE[number], "what is wrong, then what to do"

    def test_errors_that_the_system_gives(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for act, said in (
            (lambda: (tmp_path / "none").read_text(), "none: there is no such file or folder: check the name"),
            (lambda: (tmp_path / "file/under").read_text(), "under: a part of this path is a file: name a folder"),
            (lambda: tmp_path.read_text(), f"{tmp_path.name}: this is a folder: name a file"),
            (lambda: (tmp_path / "file").mkdir(), "file: there is a file of this name: name another place"),
            (lambda: Path("/dev/full").write_text("x"), "the disk is full: make room, or write elsewhere"),
        ):
            with pytest.raises(OSError) as caught:
                act()
            assert explain(caught.value).endswith(said)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_no_permission(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        with pytest.raises(OSError) as caught:
            (tmp_path / "file").touch()
        assert explain(caught.value) == f"{tmp_path / 'file'}: no permission: change it, or name another place"

    @pytest.mark.parametrize(
        "said",
        [
            "[enforce fail at inline_container.cc:672] . unexpected pos 8192 vs 8080",
            "basic_ios::clear: iostream error",
            "Error while serializing: I/O error: No space left on device (os error 28)",
            "database or disk is full",
        ],
    )
    def test_libraries_that_call_a_full_disk_otherwise(self, said: str, capsys: pytest.CaptureFixture[str]) -> None:
        """As torch, safetensors and SQLite were seen to."""
        error = RuntimeError(said)
        assert run_command(raising(error), []) == 2
        assert capsys.readouterr().err == f"error: the disk is full: make room, or write elsewhere ({said})\n"

    def test_other_errors_of_the_system_too(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command(raising(RuntimeError("I/O error: File too large (os error 27)")), []) == 2
        assert capsys.readouterr().err.startswith("error: the file grew larger than the system allows")
        with pytest.raises(RuntimeError):
            run_command(raising(RuntimeError("I/O error: of some kind (os error 4711)")), [])

    def test_a_full_disk_that_led_to_an_error_counts(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command(led_by(OSError(errno.ENOSPC, "No space left on device", "out")), []) == 2
        assert capsys.readouterr().err == "error: out: the disk is full: make room, or write elsewhere\n"
        with pytest.raises(RuntimeError, match="cannot save"):
            run_command(led_by(OSError(errno.ENOENT, "No such file or directory")), [])

    def test_an_error_without_a_message_is_named(self) -> None:
        assert explain(UserMistake()) == "UserMistake"


class TestMistakes:
    def test_says_what_it_is_about(self) -> None:
        with pytest.raises(UserMistake, match=r"^`index` is 'x': broken$"), mistakes("`index` is 'x'"):
            raise ValueError("broken")

    def test_what_says_it_all_is_left_alone(self) -> None:
        with pytest.raises(UserMistake, match=r"^complete$"), mistakes("about"):
            raise UserMistake("complete")

    def test_json_and_text_that_cannot_be_read(self) -> None:
        with pytest.raises(UserMistake, match="line 1 column 2"), mistakes():
            json.loads("{")
        with pytest.raises(UserMistake, match="can't decode"), mistakes():
            b"\xff".decode()

    def test_a_value_of_the_wrong_kind(self) -> None:
        with pytest.raises(UserMistake, match=r"^a value is of the wrong kind: '<' not .*; ask$"), reading("; ask"):
            [1] < 1  # type: ignore[operator]  # noqa: B015


class TestParser:
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--ouput", "x"], "`--ouput` is no argument of tool; is it `--output`?"),
            (["--wat=1"], "`--wat` is no argument of tool (--help"),
            ([], "the following arguments are required: --output"),
            (["--output"], "argument --output: expected one argument"),
            (["--output", "x", "--size", "0"], "argument --size: must be a whole number of at least 1, got '0'"),
            (["--output", "x", "--size", "many"], "must be a whole number of at least 1, got 'many'"),
            (["--output", "x", "y"], "unrecognized arguments: y"),
        ],
    )
    def test_one_sentence(self, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(UserMistake) as caught:
            self.parser().parse_args(words)
        assert said in str(caught.value)
        assert str(caught.value).endswith("(--help lists the arguments)")
        assert capsys.readouterr() == ("", "")

    def test_help_names_debug(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            self.parser().parse_args(["--help"])
        assert ended.value.code == 0
        assert "--debug" in capsys.readouterr().out
        assert vars(self.parser().parse_args(["--output", "x"])) == {"output": "x", "size": 1}

    @staticmethod
    def parser() -> ArgumentParser:
        parser = Parser(prog="tool")
        parser.add_argument("--output", required=True)
        parser.add_argument("--size", type=at_least(1), default=1)
        return parser


def test_the_file_may_be_joined_to_config() -> None:
    assert separate_config(["--config=a.yaml", "--seed=1"]) == ["--config", "a.yaml", "--seed=1"]
    with pytest.raises(UserMistake, match="must be followed by a YAML file"):
        separate_config(["--seed", "1", "--config"])


@pytest.mark.parametrize("name", ["runs/quickstart/warm-start", "/no/such", "./model", "a b"])
def test_a_checkpoint_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserMistake, match=rf"^`model_name_or_path` is '{name}', but there is no such folder"):
        check_checkpoint(name)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-3B"])
def test_an_id_of_the_hub_is_left_to_the_hub(name: str) -> None:
    check_checkpoint(name)
