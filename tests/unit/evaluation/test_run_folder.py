from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sorl_trl.evaluation.plan import Batch
from sorl_trl.evaluation.run_folder import RunFolder
from sorl_trl.records.evaluated import read_evaluated, read_settings, to_table, write_evaluated
from sorl_trl.types import StopReason
from sorl_trl.viewer.data import evaluation_entry

from .trajectories import answered, ended, evaluated, question

SETTINGS = {"model": {"dtype": "auto"}, "seed": 0, "datasets": {"nq": {}, "own": {}}}


def batch(index: int, dataset: str = "nq") -> Batch:
    return Batch(dataset, index, ((question("Ann"), 0),))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "runs/a")
    run.claim(SETTINGS)
    return run


def test_a_finished_batch_is_read_back(run: RunFolder) -> None:
    rows = [evaluated(question("Ann"), answered("Ann", 1)), evaluated(question("Bob"), ended(StopReason.MAX_TURNS), 1)]
    assert not run.has(batch(0))
    write_evaluated(run.shard(batch(0)), rows)
    assert run.has(batch(0))
    assert list(read_evaluated(run.path, "nq")) == to_table(rows).to_pylist()
    first, second = run.outcomes("nq")
    assert (first["question_id"], first["question"], first["exact_match"]) == ("q", "who ?", 1.0)
    assert second["stop_reason"] == StopReason.MAX_TURNS.value


def test_a_run_of_before_roles_and_environments_is_read(run: RunFolder) -> None:
    write_evaluated(run.shard(batch(0)), [evaluated(question("Ann"), answered("Ann", 1))])
    table = pq.read_table(run.shard(batch(0)))
    without_role = [{k: v for k, v in each.items() if k != "role"} for each in table["segments"][0].as_py()]
    old = table.drop_columns(["environment", "segments"]).append_column("segments", pa.array([without_role]))
    pq.write_table(old, run.shard(batch(0)))
    (row,), (outcome,) = read_evaluated(run.path, "nq"), run.outcomes("nq")
    assert "environment" not in row and "role" not in row["segments"][1]
    assert (outcome["exact_match"], outcome["environment"]) == (1.0, {})
    assert evaluation_entry(row).segments[1]["role"] is None


def test_batches_are_read_in_the_order_of_the_plan(run: RunFolder) -> None:
    for index in (1_000_000, 2, 999_999, 10):
        write_evaluated(run.shard(batch(index)), [evaluated(question("Ann"), answered("Ann"), sample=index)])
    assert [row["sample"] for row in read_evaluated(run.path, "nq")] == [2, 10, 999_999, 1_000_000]


def test_the_same_settings_go_on_and_others_are_refused_by_name(run: RunFolder) -> None:
    write_evaluated(run.shard(batch(0)), [evaluated(question("Ann"), answered("Ann"))])
    RunFolder(run.path).claim(SETTINGS)
    other = {**SETTINGS, "model": {"dtype": "bfloat16"}, "temperature": 0.5}
    with pytest.raises(ValueError, match="other settings") as refusal:
        run.claim(other)
    assert "`model.dtype` was 'auto' and is 'bfloat16'" in str(refusal.value)
    assert "seed" not in str(refusal.value)
    assert read_settings(run.path) == SETTINGS


def test_a_policy_that_was_trained_on_is_said_in_words(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    run.claim({"model": {"model_name_or_path": str(tmp_path), "policy_files": "of before"}})
    write_evaluated(run.shard(batch(0)), [evaluated(question("Ann"), answered("Ann"))])
    with pytest.raises(ValueError, match=rf"is outdated, for the policy in {tmp_path} has changed since"):
        run.claim({"model": {"model_name_or_path": str(tmp_path), "policy_files": "of now"}})


def test_a_policy_that_was_moved_is_the_same(run: RunFolder) -> None:
    run.claim({"model": {"model_name_or_path": "here", "policy_files": "same"}})
    write_evaluated(run.shard(batch(0)), [evaluated(question("Ann"), answered("Ann"))])
    run.claim({"model": {"model_name_or_path": "there", "policy_files": "same"}})


def test_settings_of_something_else_are_kept(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"editor": "vi"}')
    with pytest.raises(ValueError, match="of something else"):
        RunFolder(tmp_path).claim(SETTINGS)
    assert read_settings(tmp_path) == {"editor": "vi"}


def test_a_start_that_made_nothing_binds_nobody(run: RunFolder) -> None:
    run.claim({"model": "right at last"})
    assert read_settings(run.path) == {"model": "right at last"}
