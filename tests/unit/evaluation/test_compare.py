from __future__ import annotations

from pathlib import Path

import pytest

from sorl_trl.evaluation.compare import Run, compare_runs, read_run
from sorl_trl.evaluation.run_folder import RunFolder
from sorl_trl.records import evaluation_of
from sorl_trl.records.evaluated import files_hash

from .trajectories import outcome


def run(**datasets: dict[str, float | None]) -> Run:
    return {name: [outcome(asked, score) for asked, score in scores.items()] for name, scores in datasets.items()}


def test_differences_are_taken_question_by_question() -> None:
    before = run(nq={"ann": 0.0, "bob": 1.0, "cy": 0.0, "di": 1.0})
    after = run(nq={"di": 1.0, "cy": 1.0, "bob": 1.0, "ann": 1.0})  # in another order
    (nq,) = compare_runs(before, after)
    assert (nq["name"], nq["questions"], nq["left_out"]) == ("nq", 4, 0)
    compared = nq["measures"]["exact_match"]
    assert (compared["before"], compared["after"], compared["mean"]) == (0.5, 1.0, 0.5)
    # Of four questions two got better: no gain is drawn with probability 1/16, and none gets worse.
    assert (compared["low"], compared["high"]) == (0.0, 1.0)
    assert compared["p"] == pytest.approx(2 / 16, abs=0.02)


def test_questions_without_a_score_in_either_run_are_left_out_and_counted() -> None:
    before = run(nq={"ann": None, "bob": 1.0, "cy": 1.0}, popqa={"x": 1.0})
    after = run(nq={"ann": 1.0, "bob": 0.0, "cy": None}, popqa={"x": 0.0})
    nq, _ = compare_runs(before, after)
    assert (nq["questions"], nq["left_out"], nq["measures"]["exact_match"]["mean"]) == (1, 2, -1)


def test_questions_that_one_run_was_not_asked_are_left_out_and_counted() -> None:
    before = run(nq={"ann": 1.0, "bob": 1.0}, popqa={"x": 0.0})
    after = run(nq={"ann": 0.0, **{str(i): 0.0 for i in range(5)}})
    (nq,) = compare_runs(before, after)
    assert (nq["questions"], nq["left_out"], nq["measures"]["exact_match"]["mean"]) == (1, 6, -1)


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(ValueError, match="no scored question in common"):
        compare_runs(run(nq={"ann": 1.0}), run(nq={"bob": 1.0}))
    with pytest.raises(ValueError, match="no scored question in common"):
        compare_runs(run(nq={"ann": 1.0}), run(nq={"ann": None}))


def test_a_run_must_be_finished(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.claim({"datasets": {"nq": {}}})
    with pytest.raises(FileNotFoundError, match="holds no finished evaluation"):
        read_run(str(tmp_path))
    folder.finish({}, "")
    assert read_run(str(tmp_path)) == {"nq": []}


def test_a_policy_that_was_trained_on_is_not_compared_by_its_old_evaluation(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    (tmp_path / "config.json").touch()
    weights.write_bytes(b"1")
    model = {"model_name_or_path": str(tmp_path), "policy_files": files_hash(str(tmp_path))}
    folder = RunFolder(tmp_path / "evaluation")
    folder.claim({"datasets": {}, "model": model})
    folder.finish({}, "")
    assert read_run(str(tmp_path)) == {}
    weights.write_bytes(b"22")
    with pytest.raises(ValueError, match=rf"evaluation is outdated.*`sorl evaluate {tmp_path}` evaluates anew"):
        read_run(str(tmp_path))


@pytest.mark.parametrize("name", ["", "checkpoint-2"])
def test_a_run_that_was_moved_is_compared_though_another_has_its_name_now(tmp_path: Path, name: str) -> None:
    before, moved = tmp_path / "runs/a", tmp_path / "runs/b"
    (before / name).mkdir(parents=True)
    (before / name / "config.json").write_text("1")
    model = {"model_name_or_path": str(before / name), "policy_files": files_hash(before / name)}
    folder = RunFolder(evaluation_of(before))
    folder.claim({"datasets": {}, "model": model})
    folder.finish({}, "")
    before.rename(moved)
    (before / name).mkdir(parents=True)
    (before / name / "config.json").write_text("22")
    assert read_run(str(moved)) == {}
