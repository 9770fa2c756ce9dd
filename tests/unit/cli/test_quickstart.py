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
    for output, said in (("file", "Not a directory: "), ("policy", "policy holds something else than a quickstart")):
        assert main(["quickstart", "--output", output]) == 2
        shown = capsys.readouterr()
        assert shown.err.startswith("error: ") and said in shown.err and shown.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_training_reads_what_was_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("sorl_trl.cli.launch.main", lambda words: seen.extend(words))
    quickstart.train(quickstart.TINY, tmp_path, ["--seed", "1"])
    assert seen[:4] == ["--accelerate_config", "single_cpu", "--config", "quickstart"]
    paths = {"model_name_or_path": "warm-start", "output_dir": "policy", "corpus": "world/corpus.jsonl"}
    paths |= {"train_questions": "world/train.jsonl", "eval_questions": "world/eval.jsonl"}
    expected = {"--seed": "1"} | {f"--{name}": str(tmp_path / path) for name, path in paths.items()}
    assert dict(zip(seen[4::2], seen[5::2], strict=True)) == expected


def test_a_training_that_failed_ends_it_with_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sorl_trl.cli.launch.main", lambda words: 2)
    with pytest.raises(SystemExit) as done:
        quickstart.train(quickstart.TINY, tmp_path, [])
    assert done.value.code == 2


ARGUMENTS = {"seed": 0, "model": None, "max_steps": None}


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, given = tmp_path / "run", []
    monkeypatch.setattr("sorl_trl.cli.launch.main", lambda words: given.append(words))
    quickstart.clear(run, ARGUMENTS)
    (run / "policy/checkpoint-8").mkdir(parents=True)
    (run / "policy/checkpoint-8/trainer_state.json").touch()
    quickstart.clear(run, ARGUMENTS)
    quickstart.train(quickstart.TINY, run, [])
    assert given[0][-2:] == ["--resume_from_checkpoint", "latest"]
    quickstart.train(quickstart.TINY, run, [])
    assert len(given) == 1, "it has been trained"


@pytest.mark.parametrize(
    "left", ["recipe.yaml", "checkpoint-8/model.safetensors", "checkpoint-8/trainer_state.json config.json"]
)
def test_what_cannot_be_gone_on_with_is_trained_anew(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without a checkpoint, one that is half written, and a policy that is."""
    given: list[list[str]] = []
    monkeypatch.setattr("sorl_trl.cli.launch.main", lambda words: given.append(words))
    (tmp_path / "policy/checkpoint-8").mkdir(parents=True)
    for name in left.split():
        (tmp_path / "policy" / name).touch()
    quickstart.train(quickstart.TINY, tmp_path, [])
    assert "--resume_from_checkpoint" not in given[0] and not (tmp_path / "policy").exists()


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_ended_or_had_other_arguments_is_replaced(tmp_path: Path, ended: bool) -> None:
    quickstart.clear(tmp_path, ARGUMENTS)
    (tmp_path / "policy").mkdir()
    if ended:
        (tmp_path / quickstart.SUMMARY).touch()
    quickstart.clear(tmp_path, ARGUMENTS if ended else {**ARGUMENTS, "seed": 1})
    assert not (tmp_path / "policy").exists()
