from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from sorl_trl.records.evaluated import to_table
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
