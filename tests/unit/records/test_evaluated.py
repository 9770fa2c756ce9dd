from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from sorl_trl.records.evaluated import files_hash, to_table
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


def test_a_copy_has_the_hash_of_the_original_and_trained_weights_have_another(tmp_path: Path) -> None:
    policy, weights = tmp_path / "policy", torch.zeros(2**21)
    policy.mkdir()
    save_file({"embedding": weights}, policy / "model.safetensors")
    before = files_hash(str(policy))
    shutil.copytree(policy, tmp_path / "copy", copy_function=shutil.copyfile)  # whose times are of now
    assert files_hash(str(tmp_path / "copy")) == before
    save_file({"embedding": weights + 1e-6}, policy / "model.safetensors")
    assert files_hash(str(policy)) != before
