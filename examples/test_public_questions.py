"""Rows of every public schema, and the files that are written of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from examples.public_questions import SETS, main
from sorl_trl.qa import Question, load_questions

FLASHRAG = {"id": "test_0", "question": "who?", "golden_answers": ["Ann", " "], "metadata": {"type": "bridge"}}
SEARCH_R1 = {
    **{"id": "train_0", "question": "who?", "golden_answers": ["Ann"], "data_source": "hotpotqa"},
    **{"prompt": [{"role": "user", "content": "who?"}], "ability": "fact-reasoning", "metadata": None},
}
DRUGS = {"A": "Aspirin", "B": "Biotin"}
MEDQA = {"question": " Which drug? ", "answer": "Biotin", "options": {**DRUGS, "C": None}, "answer_idx": "B"}
NUMBERS = {"A": "one", "B": "two", "C": "three", "D": "four"}
MEDMCQA = {"id": "1-2", "question": "How many?", "cop": 0, "exp": "because"}
MEDMCQA |= {f"op{letter.lower()}": each for letter, each in NUMBERS.items()}
ABOUT = {"context": {"labels": ["X"]}}
PUBMEDQA = {"pubid": 21645374, "question": "Matters it?", **ABOUT, "final_decision": "no"}
VERDICTS = {"A": "yes", "B": "no", "C": "maybe"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `datasets` converts is kept beside the test's files."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "row", "question"),
    [
        ("nq", FLASHRAG, Question("test_0", "who?", ("Ann",), {"type": "bridge"}, data_source="nq")),
        ("search_r1", SEARCH_R1, Question("hotpotqa-train_0", "who?", ("Ann",), data_source="hotpotqa")),
        ("medqa", MEDQA, Question("test_0", "Which drug?", ("Biotin",), {"answer": "Biotin"}, DRUGS, "medqa")),
        ("medmcqa", MEDMCQA, Question("1-2", "How many?", ("one",), {"exp": "because"}, NUMBERS, "medmcqa")),
        ("pubmedqa", PUBMEDQA, Question("21645374", "Matters it?", ("no",), ABOUT, VERDICTS, "pubmedqa")),
    ],
)
def test_a_row_is_written_as_a_question(tmp_path: Path, name: str, row: dict[str, Any], question: Question) -> None:
    """Splits may have different columns, and one without an answer gets no file."""
    folder = tmp_path / "source" / name
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text(json.dumps(row) + "\n")
    datasets.Dataset.from_list([{**row, "extra": 1, "question": " "}]).to_parquet(folder / "train.parquet")
    main([name, "--source", str(tmp_path / "source"), "--output", str(tmp_path / "data")])
    assert load_questions(tmp_path / "data" / f"{name}_test.jsonl") == [question]
    assert [path.name for path in (tmp_path / "data").iterdir()] == [f"{name}_test.jsonl"]


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("nq", FLASHRAG | {"golden_answers": ["", " "]}, "golden_answers"),
        ("nq", FLASHRAG | {"golden_answers": None}, "golden_answers"),
        ("medqa", MEDQA | {"options": {"A": "x", "B": "", "C": "y"}}, "`B`"),
        ("medqa", MEDQA | {"options": {"A": "x", "B": "x"}}, "exactly one"),
        *(("medmcqa", MEDMCQA | {"cop": cop}, "cop") for cop in (-1, None, 4)),
        ("pubmedqa", PUBMEDQA | {"final_decision": None}, "final_decision"),
    ],
)
def test_rows_without_a_clear_answer_are_left_out(name: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SETS[name].parse({"id": "1", "data_source": "set", **row})
