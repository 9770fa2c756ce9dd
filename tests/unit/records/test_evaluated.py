from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.evaluation import from_row
from sorl_trl.qa import Question
from sorl_trl.records.evaluated import EvaluatedTrajectory, to_table
from sorl_trl.types import Observation, Passage
from tests.unit.evaluation.trajectories import answered, evaluated, question
from tests.unit.records.strategies import EVALUATED


@settings(max_examples=60, deadline=None)
@given(st.lists(EVALUATED, max_size=3))
def test_rows_are_read_back_exactly(rows: list[EvaluatedTrajectory]) -> None:
    assert [from_row(row) for row in to_table(rows).to_pylist()] == rows


def test_options_are_read_back_in_order() -> None:
    choice = Question("q", "which ?", ("Ann",), options={"B": "Ann", "A": "Bob"}, data_source="medqa")
    (row,) = to_table([evaluated(choice, answered("B"))]).to_pylist()
    assert list(from_row(row).question.options.items()) == [("B", "Ann"), ("A", "Bob")]


def test_half_a_surrogate_pair_in_a_passage_becomes_a_question_mark() -> None:
    passage = Passage("p\ud800", "a \udc00 title", "text")
    seen = Observation((2,), "text", (passage,))
    trajectory = replace(answered("Ann"), segments=(*answered("Ann", 1).segments[:1], seen))
    (row,) = to_table([evaluated(question("Ann\ud800"), trajectory)]).to_pylist()
    assert from_row(row).trajectory.observations[0].passages == (Passage("p?", "a ? title", "text"),)
    assert from_row(row).question.golden_answers == ("Ann?",)


def test_the_datasets_library_reads_the_file(tmp_path: Path) -> None:
    from datasets import load_dataset

    rows = [evaluated(question("Ann", hops=2), answered("Ann", searches=i), sample=i) for i in range(3)]
    pq.write_table(to_table(rows), tmp_path / "rows.parquet")
    loaded = load_dataset(
        "parquet", data_files=str(tmp_path / "rows.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded["answer"][0] == "Ann"
    assert [segment["kind"] for segment in loaded[1]["segments"]] == ["turn", "observation", "turn"]
    assert [from_row(row) for row in loaded] == rows
