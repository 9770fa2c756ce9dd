"""`sorl train`: whose argument is whose, which config the launcher reads, and how a training that failed ends."""

from __future__ import annotations

import os
import signal
import subprocess
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from sorl_trl.cli import train
from sorl_trl.command_line import run_command

SINGLE = ["--accelerate_config", "single_cpu"]


@pytest.mark.parametrize(
    ("words", "for_launch", "for_training"),
    [
        ("--config r.yaml --num_processes 2 --seed 1", {"num_processes": 2}, "--config r.yaml --seed 1"),
        ("--num-processes=2 --rewards f1 em --multi_gpu", {"num_processes": 2, "multi_gpu": True}, "--rewards f1 em"),
        ("--main_process_ip= --use_cpu=true", {"main_process_ip": ""}, "--use_cpu=true"),
        ("--gradient_accumulation_steps 2 --debug", {"debug": None}, "--gradient_accumulation_steps 2 --debug"),
    ],
)
def test_the_launcher_takes_its_options_and_training_all_others(
    words: str, for_launch: dict[str, object], for_training: str
) -> None:
    found = train.launch_arguments(words.split())
    assert {name: getattr(found, name) for name in for_launch} == for_launch
    assert (found.module, found.training_script) == (True, train.MODULE)
    assert found.training_script_args == for_training.split()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--config", "so_gpro"], "--config: 'so_gpro'"),
        (["--accelerate_config", "zero9"], "--accelerate_config: 'zero9'"),
        (["--num_processes", "two"], "--num_processes"),
        (["--accelerate_config", "odd.yaml"], "'DEEPSPED'"),
        (["--accelerate_config", "broken.yaml"], "broken.yaml"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.yaml").write_text("distributed_type: DEEPSPED\n")
    (tmp_path / "broken.yaml").write_text("a: [1\nb: 2\n")
    assert run_command(train.launch, words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and named in shown and shown.count("\n") == 1


def launch(monkeypatch: pytest.MonkeyPatch, launched: Callable[[Namespace], None]) -> int | str | None:
    """The exit code, or the line with which it exits, where accelerate does what `launched` does."""
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launched)
    try:
        return run_command(train.launch, SINGLE)
    except SystemExit as done:
        return done.code


def elastic(code: int) -> ChildFailedError:
    return ChildFailedError("training", {0: ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="")})


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (subprocess.CalledProcessError(2, "training"), 2),
        (elastic(1), 1),
        (subprocess.CalledProcessError(-9, "training"), "error: training was terminated by SIGKILL"),
        (elastic(-15), "error: training was terminated by SIGTERM"),
        (subprocess.CalledProcessError(-2, "training"), 130),
    ],
)
def test_a_training_that_failed_has_reported_why(
    error: Exception, code: int | str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: Namespace) -> None:
        raise error

    assert launch(monkeypatch, fail) == code
    assert capsys.readouterr().err == ""


def test_training_ends_with_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    training: list[subprocess.Popen[bytes]] = []

    def be_terminated(arguments: Namespace) -> None:
        training.append(subprocess.Popen(["sleep", "60"]))
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert launch(monkeypatch, be_terminated) == "error: training was terminated by SIGTERM"
    assert training[0].wait(10) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_modules_of_the_current_folder_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    assert launch(monkeypatch, lambda arguments: seen.append(os.environ.get("PYTHONSAFEPATH"))) == 0
    assert seen == ["1"]
    assert "PYTHONSAFEPATH" not in os.environ
