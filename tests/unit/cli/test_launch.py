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

from sorl_trl.cli import launch
from sorl_trl.command_line import run_command
from sorl_trl.shipped import PACKAGE

PARSER = launch._parser()
CONFIGS = PACKAGE / "accelerate_configs"
TRAIN = ["--train_questions", "nq", "--model_name_or_path", "."]


@pytest.mark.parametrize(
    ("words", "for_launch"),
    [
        ("--config r.yaml --num_processes 2 --seed 1", "--num_processes 2"),
        ("--num-processes=2 --rewards f1 exact_match --multi_gpu --seed 1", "--num-processes=2 --multi_gpu"),
        ("--rewards f1 exact_match --main_process_ip 10.0.0.1", "--main_process_ip 10.0.0.1"),
        ("--main_process_ip= --seed 1", "--main_process_ip="),
        ("--accelerate_config zero3 --config r.yaml", "--accelerate_config zero3"),
        ("--accelerate_config=zero3 --config=r.yaml", "--accelerate_config=zero3"),
        ("--gradient_accumulation_steps 2 --help", ""),
        ("--num_processes", "--num_processes"),
        ("", ""),
    ],
)
def test_split(words: str, for_launch: str) -> None:
    ours, theirs = words.split(), for_launch.split()
    for word in theirs:
        ours.remove(word)
    assert launch.split(words.split(), PARSER) == (theirs, ours)


def read(*words: str) -> Namespace:
    return launch.read_launch_arguments(*launch.split(words, PARSER), PARSER)


class TestReadLaunchArguments:
    def test_training_gets_its_words_as_they_are(self) -> None:
        words = ["--config", "r.yaml", "--rewards", "f1", "exact_match", "--use_cpu=true"]
        found = read(*words[:2], "--num_processes", "2", *words[2:])
        assert (found.module, found.training_script, found.training_script_args) == (True, launch.MODULE, words)
        assert (found.num_processes, found.config_file) == (2, None)

    def test_a_config_by_its_name_or_path(self, tmp_path: Path) -> None:
        assert read("--accelerate_config", "ddp").config_file == str(CONFIGS / "ddp.yaml")
        own = tmp_path / "own.yaml"
        own.write_text((CONFIGS / "ddp.yaml").read_text())
        assert read("--accelerate_config", str(own)).config_file == str(own)
        assert read("--config_file", "own.yaml").config_file == "own.yaml"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--accelerate_config", "zero9"], "--accelerate_config: 'zero9' is neither a file nor the name"),
        (["--accelerate_config"], "argument --accelerate_config/--accelerate-config: expected one argument"),
        (["--num_processes", "two"], "argument --num_processes/--num-processes: invalid int value: 'two'"),
        (["--accelerate_config", "list.yaml"], "list.yaml must contain a YAML mapping"),
        (["--accelerate_config", "odd.yaml"], "'DEEPSPED' is not a valid DistributedType"),
        (["--accelerate_config", "broken.yaml"], "broken.yaml: while parsing a flow sequence"),
        (["--config_file", "nowhere.yaml"], "The passed configuration file `nowhere.yaml` does not exist"),
        (["--module", "--no_python", "--cpu"], "--module and --no_python cannot be used together"),
    ],
)
def test_mistakes(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "odd.yaml").write_text("distributed_type: DEEPSPED\n")
    (tmp_path / "broken.yaml").write_text("a: [1\nb: 2\n")
    assert run_command(launch.main, [*TRAIN, *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


def ending(monkeypatch: pytest.MonkeyPatch, launched: Callable[[Namespace], None]) -> None:
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launched)


def elastic(code: int) -> ChildFailedError:
    return ChildFailedError("training", {0: ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="")})


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (subprocess.CalledProcessError(2, "training"), 2, ""),
        (elastic(2), 2, ""),
        (subprocess.CalledProcessError(1, "training"), 1, ""),
        (subprocess.CalledProcessError(-9, "training"), 1, "error: training was ended by SIGKILL\n"),
        (elastic(-15), 1, "error: training was ended by SIGTERM\n"),
        (ImportError("DeepSpeed is not installed"), 2, "error: DeepSpeed is not installed\n"),
    ],
)
def test_the_end_of_a_training_that_failed(
    error: Exception, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake of the user is said by training itself: the launcher adds nothing."""

    def fail(arguments: Namespace) -> None:
        assert not arguments.quiet, "the launcher would make every exit code 1"
        raise error

    ending(monkeypatch, fail)
    assert run_command(launch.main, [*TRAIN, "--accelerate_config", "single_cpu", "--quiet"]) == code
    assert capsys.readouterr().err == said


def test_to_be_told_to_end_ends_training_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(arguments: Namespace) -> None:
        with subprocess.Popen(["sleep", "60"]) as training:
            signal.raise_signal(signal.SIGTERM)
        raise subprocess.CalledProcessError(training.returncode, "training")

    ending(monkeypatch, train)
    before = signal.getsignal(signal.SIGTERM)
    assert run_command(launch.main, [*TRAIN, "--accelerate_config", "single_cpu"]) == 1
    assert capsys.readouterr().err == "error: training was ended by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_folder_in_which_it_is_started_is_not_imported_from(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    ending(monkeypatch, lambda arguments: seen.append(os.environ.get("PYTHONSAFEPATH")))
    assert run_command(launch.main, [*TRAIN, "--accelerate_config", "single_cpu"]) == 0
    assert seen == ["1"]
    assert "PYTHONSAFEPATH" not in os.environ
