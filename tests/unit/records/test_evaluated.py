from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from sorl_trl.records.entries import evaluation_entry
from sorl_trl.records.evaluated import evaluated_shards, files_hash, read_evaluated, read_outcomes, to_table
from sorl_trl.types import Observation, Passage
from tests.unit.evaluation.trajectories import answered, evaluated, question


def test_half_a_surrogate_pair_in_a_passage_becomes_a_question_mark() -> None:
    passage = Passage("p\ud800", "a \udc00 title", "text", 0.5)
    seen = Observation((2,), "text", (passage,), truncated=True, neutralized=3)
    trajectory = replace(answered("Ann"), segments=(*answered("Ann", 1).segments[:1], seen))
    (row,) = to_table([evaluated(question("Ann\ud800"), trajectory)]).to_pylist()
    segment = row["segments"][1]
    assert segment["passages"] == [{"id": "p?", "title": "a ? title", "text": "text", "score": 0.5}]
    assert (segment["truncated"], segment["neutralized"], row["golden_answers"]) == (True, 3, ["Ann?"])


def test_the_datasets_library_reads_the_file(tmp_path: Path) -> None:
    from datasets import load_dataset

    rows = [evaluated(question("Ann", hops=2), answered("Ann", searches=i), sample=i) for i in range(3)]
    pq.write_table(to_table(rows), tmp_path / "rows.parquet")
    loaded = load_dataset(
        "parquet", data_files=str(tmp_path / "rows.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded["answer"][0] == "Ann"
    assert [segment["kind"] for segment in loaded[1]["segments"]] == ["turn", "observation", "turn"]
    assert [json.loads(row["metadata"]) for row in loaded] == [{"hops": 2}] * 3
    assert [row["exact_match"] for row in loaded] == [1.0] * 3


def test_a_run_of_before_roles_and_environments_is_read(tmp_path: Path) -> None:
    table = to_table([evaluated(question("Ann"), answered("Ann", 1))])
    without_role = [{k: v for k, v in each.items() if k != "role"} for each in table["segments"][0].as_py()]
    old = table.drop_columns(["environment", "segments"]).append_column("segments", pa.array([without_role]))
    (tmp_path / "trajectories/nq").mkdir(parents=True)
    pq.write_table(old, tmp_path / "trajectories/nq/000000.parquet")
    (row,) = read_evaluated(tmp_path, "nq")
    (outcome,) = read_outcomes(evaluated_shards(tmp_path, "nq"))
    assert "environment" not in row and "role" not in row["segments"][1]
    assert (outcome["exact_match"], outcome["environment"]) == (1.0, {})
    assert evaluation_entry(row).segments[1]["role"] is None


def test_a_copy_has_the_hash_of_the_original_and_trained_weights_have_another(tmp_path: Path) -> None:
    policy, weights = tmp_path / "policy", torch.zeros(2**21)
    policy.mkdir()
    save_file({"embedding": weights}, policy / "model.safetensors")
    before = files_hash(str(policy))
    shutil.copytree(policy, tmp_path / "copy", copy_function=shutil.copyfile)  # whose times are of now
    assert files_hash(str(tmp_path / "copy")) == before
    save_file({"embedding": weights + 1e-6}, policy / "model.safetensors")
    assert files_hash(str(policy)) != before


def test_the_hash_of_a_folder_changes_with_its_files(tmp_path: Path) -> None:
    assert files_hash("Qwen/Qwen2.5-7B") is None
    (tmp_path / "model.safetensors").write_bytes(b"1")
    first = files_hash(str(tmp_path))
    assert first == files_hash(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"22")
    second = files_hash(str(tmp_path))
    (tmp_path / "adapter_config.json").touch()
    third = files_hash(str(tmp_path))
    assert len({first, second, third}) == 3
    (tmp_path / "notes.txt").mkdir()  # nor is a folder
    for name in ("trajectories.html", "metrics.json"):  # what is beside a policy is no part of it
        (tmp_path / name).touch()
    assert files_hash(str(tmp_path)) == third
