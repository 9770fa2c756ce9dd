"""Rows of every public schema, and folders as `datasets` reads them."""

from __future__ import annotations

import json

import datasets
import pytest

from sorl_trl.qa import Question, load_benchmark
from sorl_trl.qa.benchmarks import (
    UnusableRow,
    parse_flashrag,
    parse_medmcqa,
    parse_medqa,
    parse_pubmedqa,
)

FLASHRAG = {
    "id": "test_0",
    "question": "who wrote it?",
    "golden_answers": ["Ann", "Ann Lee"],
    "metadata": {"type": "bridge"},
}
SEARCH_R1 = {
    "id": "train_0",
    "question": "who wrote it?",
    "golden_answers": ["Ann"],
    "data_source": "hotpotqa",
    "prompt": [{"role": "user", "content": "Answer the given question. who wrote it?"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann Lee"]}},
    "extra_info": {"index": 0, "split": "train"},
    "metadata": None,
}
DRUGS = {"A": "Aspirin", "B": "Biotin", "C": "Vitamin C", "D": "Dopamine"}
MEDQA = {"question": "Which drug?", "answer": "Vitamin C", "options": DRUGS, "meta_info": "step1", "answer_idx": "C"}
NUMBERS = {"opa": "one", "opb": "two", "opc": "three", "opd": "four", "cop": 1}
MEDMCQA = {"id": "1-2", "question": "How many?", **NUMBERS, "exp": "because", "topic_name": None}
PUBMEDQA = {
    "pubid": 21645374,
    "question": "Do mitochondria matter?",
    "context": {"contexts": ["Cells die, programmed."], "labels": ["BACKGROUND"]},
    "final_decision": "yes",
}


def test_flashrag():
    row = FLASHRAG | {"data_source": "nq"}
    assert parse_flashrag(row) == Question(
        "test_0", "who wrote it?", ("Ann", "Ann Lee"), {"type": "bridge"}, data_source="nq"
    )
    assert parse_flashrag(row | {"metadata": None}).metadata == {}
    assert parse_flashrag(row | {"golden_answers": ["", "Ann", " "]}).golden_answers == ("Ann",)
    del row["metadata"]
    assert parse_flashrag(row).metadata == {}


def test_medqa():
    row = MEDQA | {"id": "test_0", "data_source": "medqa"}
    about = {"answer": "Vitamin C", "meta_info": "step1"}
    assert parse_medqa(row) == Question("test_0", "Which drug?", ("Vitamin C",), about, DRUGS, "medqa")
    letters_of_other_rows = {"A": "yes", "B": "no", "C": None}
    fewer = parse_medqa(row | {"options": letters_of_other_rows, "answer_idx": "B"})
    assert fewer.options == {"A": "yes", "B": "no"}


def test_medmcqa_counts_from_zero():
    question = parse_medmcqa(MEDMCQA | {"cop": 0, "data_source": "medmcqa"})
    assert question.golden_answers == ("one",)
    assert question.options == {"A": "one", "B": "two", "C": "three", "D": "four"}
    assert question.metadata == {"exp": "because", "topic_name": None}
    with pytest.raises(UnusableRow, match="another option"):
        parse_medmcqa(MEDMCQA | {"opa": "two", "data_source": "medmcqa"})


def test_pubmedqa():
    question = parse_pubmedqa(PUBMEDQA | {"id": "?", "data_source": "pubmedqa"})
    assert (question.id, question.golden_answers) == ("21645374", ("yes",))
    assert question.options == {"A": "yes", "B": "no", "C": "maybe"}
    assert "programmed" not in question.question
    assert question.metadata == {"context": PUBMEDQA["context"]}


@pytest.mark.parametrize(
    ("parse", "row", "field"),
    [
        (parse_flashrag, FLASHRAG | {"question": " "}, "question"),
        *[(parse_flashrag, FLASHRAG | {"golden_answers": none}, "golden_answers") for none in (None, ["", " "])],
        (parse_medqa, MEDQA | {"options": {"A": "x", "B": "", "C": "y"}}, "B"),
        (parse_medmcqa, MEDMCQA | {"cop": -1}, "cop"),
        (parse_pubmedqa, PUBMEDQA | {"final_decision": None}, "final_decision"),
    ],
)
def test_unusable_rows(parse, row, field):
    with pytest.raises(UnusableRow, match=f"`{field}` is"):
        parse({"id": "1", "data_source": "set"} | row)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What `datasets` converts is kept beside the test's files."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "source"
    path.mkdir()
    return path


def write_jsonl(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def flashrag(number, **changes):
    return FLASHRAG | {"id": f"test_{number}"} | changes


def test_splits_whose_columns_differ(folder):
    """As Search-R1's: its test split joins sets whose metadata its training split lacks."""
    for split, metadata in (("train", {"level": "easy"}), ("test", {"level": None, "hops": 2})):
        rows = datasets.Dataset.from_list([SEARCH_R1 | {"metadata": metadata, "id": f"{split}_0"}])
        rows.to_parquet(folder / f"{split}.parquet")
    [trained] = load_benchmark("nq_hotpotqa_train", "train", folder)
    assert (trained.id, trained.golden_answers) == ("hotpotqa-train_0", ("Ann",))
    [tested] = load_benchmark("nq_hotpotqa_train", source=folder)
    assert (tested.id, tested.metadata) == ("hotpotqa-test_0", {"level": None, "hops": 2})


@pytest.mark.parametrize(("name", "split"), [("nq", "test"), ("musique", "dev")])
def test_the_evaluation_split_is_test_else_dev(folder, name, split):
    """`dev` and `validation` mean the same."""
    for each in ("train", "dev", "test"):
        rows = [flashrag(0, golden_answers=[]), flashrag(1, question=each), flashrag(2)]
        write_jsonl(folder / f"{each}.jsonl", *rows)
    [question] = load_benchmark(name, source=folder, limit=1)
    assert (question.question, question.data_source) == (split, name)
    assert load_benchmark(name, "validation", folder)[0].question == "dev"


def test_a_copy_of_the_hubs_repository(folder):
    write_jsonl(folder / "nq" / "test.jsonl", flashrag(0, question="of nq"))
    write_jsonl(folder / "popqa" / "test.jsonl", flashrag(0, question="of popqa"))
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: test\n    path: {name}/test.jsonl\n"
        for name in ("nq", "popqa")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert [q.question for q in load_benchmark("popqa", source=folder)] == ["of popqa"]


@pytest.mark.parametrize(
    ("name", "file", "rows", "named"),
    [
        ("medmcqa", "validation", [MEDMCQA, MEDMCQA | {"cop": 4}], r"medmcqa, split 'validation', row 1: `cop`"),
        ("nq", "test", [MEDQA], r"nq, split 'test', row 0: 'golden_answers' is missing"),
        ("nq", "train", [FLASHRAG], r"split of nq must be one of train, got 'test'"),
        ("nq", "test", [FLASHRAG | {"golden_answers": []}], r"nq, split 'test': no usable row \(1: "),
    ],
)
def test_what_is_wrong_is_named(folder, name, file, rows, named):
    write_jsonl(folder / f"{file}.jsonl", *rows)
    with pytest.raises(ValueError, match=named):
        load_benchmark(name, source=folder)


def test_a_missing_folder_is_not_looked_for_on_the_hub():
    with pytest.raises(FileNotFoundError, match="source"):
        load_benchmark("nq", source="RUC-NLPIR/FlashRAG_datasets")
