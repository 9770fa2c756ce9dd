"""The quickstart before it starts and after it has trained: what it needs, where it writes, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_trl.cli import quickstart
from sorl_trl.cli.main import main


def test_what_is_missing_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "find_spec", lambda library: None)
    assert main(["quickstart"]) == 2
    assert capsys.readouterr().err == "error: the quickstart needs: pip install 'sorl-trl[sandbox]'\n"
    assert [*tmp_path.iterdir()] == []


def test_a_folder_of_something_else_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").mkdir()
    for name in ("policy/config.json", "file"):
        (tmp_path / name).touch()
    before = sorted(tmp_path.rglob("*"))
    for output in ("file", "policy"):
        assert main(["quickstart", "--output", output]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("error: ") and output in shown and shown.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words of each `sorl train` that the quickstart launches, which then does nothing."""
    given: list[list[str]] = []
    monkeypatch.setattr(quickstart, "launch", lambda words: given.append(words))
    return given


def test_a_training_that_failed_ends_it_with_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "launch", lambda words: 2)
    with pytest.raises(SystemExit) as done:
        quickstart.train(quickstart.TINY, tmp_path, [])
    assert done.value.code == 2


ARGUMENTS = {"seed": 0, "model": None, "max_steps": None}


def make_policy(run: Path, *files: str) -> None:
    (run / "policy/checkpoint-8").mkdir(parents=True)
    for name in files:
        (run / "policy" / name).touch()


def test_an_interrupted_run_goes_on(tmp_path: Path, launched: list[list[str]]) -> None:
    quickstart.clear(tmp_path, ARGUMENTS)
    make_policy(tmp_path, "checkpoint-8/trainer_state.json")
    quickstart.clear(tmp_path, ARGUMENTS)
    quickstart.train(quickstart.TINY, tmp_path, [])
    assert launched[0][-2:] == ["--resume_from_checkpoint", "latest"]
    (tmp_path / "policy/trainer_state.json").touch()
    quickstart.train(quickstart.TINY, tmp_path, [])
    assert len(launched) == 1, "it has been trained"


@pytest.mark.parametrize(
    "left", ["recipe.yaml", "checkpoint-8/model.safetensors", "checkpoint-8/trainer_state.json config.json"]
)
def test_what_cannot_be_gone_on_with_is_trained_anew(left: str, tmp_path: Path, launched: list[list[str]]) -> None:
    """A run without a checkpoint, one that is half written, and a policy that is."""
    make_policy(tmp_path, *left.split())
    quickstart.train(quickstart.TINY, tmp_path, [])
    assert "--resume_from_checkpoint" not in launched[0] and not (tmp_path / "policy").exists()


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_ended_or_had_other_arguments_is_replaced(tmp_path: Path, ended: bool) -> None:
    quickstart.clear(tmp_path, ARGUMENTS)
    (tmp_path / "policy").mkdir()
    if ended:
        (tmp_path / quickstart.SUMMARY).touch()
    quickstart.clear(tmp_path, ARGUMENTS if ended else {**ARGUMENTS, "seed": 1})
    assert not (tmp_path / "policy").exists()
