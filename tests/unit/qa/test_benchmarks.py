from __future__ import annotations

import json

import datasets
import pytest

from sorl_trl.qa import BENCHMARKS, load_benchmark
from tests.unit.qa import rows

FLASHRAG_SETS = ["nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"]


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
    return rows.FLASHRAG | {"id": f"test_{number}"} | changes


def test_jsonl(folder):
    write_jsonl(folder / "train.jsonl", flashrag(7))
    write_jsonl(folder / "test.jsonl", flashrag(0), flashrag(1, golden_answers=["Bo"]))
    first, second = load_benchmark("nq", source=folder)
    assert (first.id, first.question, first.golden_answers) == ("test_0", "who wrote it?", ("Ann", "Ann Lee"))
    assert (first.metadata, first.options, first.data_source) == ({"type": "bridge"}, {}, "nq")
    assert (second.id, second.golden_answers) == ("test_1", ("Bo",))


def test_json(folder):
    (folder / "dev.json").write_text(json.dumps([flashrag(0), flashrag(1)]))
    assert [question.id for question in load_benchmark("musique", source=str(folder))] == ["test_0", "test_1"]


def test_parquet(folder):
    datasets.Dataset.from_list([rows.SEARCH_R1]).to_parquet(folder / "train.parquet")
    mixture = [rows.SEARCH_R1 | {"data_source": source, "id": "test_0"} for source in ("nq", "hotpotqa")]
    datasets.Dataset.from_list(mixture).to_parquet(folder / "test.parquet")
    [trained] = load_benchmark("nq_hotpotqa_train", "train", folder)
    assert (trained.id, trained.golden_answers) == ("hotpotqa-train_0", ("Ann",))
    tested = load_benchmark("nq_hotpotqa_train", source=folder)
    assert [(question.id, question.data_source) for question in tested] == [
        ("nq-test_0", "nq"),
        ("hotpotqa-test_0", "hotpotqa"),
    ]


def test_splits_of_columns_that_differ(folder):
    """As Search-R1's: its test split joins sets whose metadata its training split lacks."""
    for split, metadata in (("train", {"level": "easy"}), ("test", {"level": None, "hops": 2})):
        row = rows.SEARCH_R1 | {"metadata": metadata}
        datasets.Dataset.from_list([row]).to_parquet(folder / f"{split}.parquet")
    for split, metadata in (("train", {"level": "easy"}), ("test", {"level": None, "hops": 2})):
        [question] = load_benchmark("nq_hotpotqa_train", split, folder)
        assert question.metadata == metadata


def test_splits_with_files_of_their_own_are_asked_for_one_by_one(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *words, **more: asked.append((words, more)) or {"test": []})
    with pytest.raises(ValueError, match="no row can be used"):
        load_benchmark("nq_hotpotqa_train")
    file = "hf://datasets/PeterJinGo/nq_hotpotqa_train/test.parquet"
    assert asked == [(("parquet",), {"data_files": {"test": file}})]
    with pytest.raises(ValueError, match="must be one of train, test, got 'dev'"):
        load_benchmark("nq_hotpotqa_train", "dev")


@pytest.mark.parametrize("name", FLASHRAG_SETS)
def test_the_evaluation_split_is_test_else_dev(folder, name):
    for split in ("train", "dev", "test"):
        write_jsonl(folder / f"{split}.jsonl", flashrag(0, question=split))
    [question] = load_benchmark(name, source=folder)
    assert question.question == BENCHMARKS[name].evaluation_split
    assert question.question == ("dev" if name in ("hotpotqa", "2wikimultihopqa", "musique") else "test")
    assert question.data_source == name


@pytest.mark.parametrize("split", ["dev", "validation"])
def test_dev_and_validation_mean_the_same(folder, split):
    write_jsonl(folder / "dev.jsonl", flashrag(0))
    assert len(load_benchmark("nq", split, folder)) == 1


def test_a_copy_of_the_hubs_repository(folder):
    write_jsonl(folder / "nq" / "test.jsonl", flashrag(0, question="of nq"))
    write_jsonl(folder / "popqa" / "test.jsonl", flashrag(0, question="of popqa"))
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: test\n    path: {name}/test.jsonl\n"
        for name in ("nq", "popqa")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert [q.question for q in load_benchmark("popqa", source=folder)] == ["of popqa"]


def test_the_limit_counts_questions(folder):
    write_jsonl(folder / "test.jsonl", flashrag(0, golden_answers=[]), *map(flashrag, range(1, 4)))
    questions = load_benchmark("nq", source=folder, limit=2)
    assert [question.id for question in questions] == ["test_1", "test_2"]


def test_a_bad_row_is_named(folder):
    write_jsonl(folder / "validation.jsonl", rows.MEDMCQA, rows.MEDMCQA | {"cop": 4})
    with pytest.raises(ValueError, match=r"medmcqa, split 'validation', row 1: `cop` must be 0 to 3, .* got 4"):
        load_benchmark("medmcqa", source=folder)


def test_a_broken_file_is_an_error(folder):
    (folder / "test.jsonl").write_text(json.dumps(rows.FLASHRAG) + '\n{"id":\n')
    with pytest.raises(ValueError, match=r"cannot be read .*JSON parse error"):
        load_benchmark("nq", source=folder)


def test_another_sets_schema_is_named(folder):
    write_jsonl(folder / "test.jsonl", rows.MEDQA)
    with pytest.raises(
        ValueError, match=r"nq, split 'test', row 0: 'golden_answers' is missing; the row has .*'answer'"
    ):
        load_benchmark("nq", source=folder)


def test_a_missing_split_lists_the_others(folder):
    write_jsonl(folder / "train.jsonl", flashrag(0))
    with pytest.raises(ValueError, match="split of nq must be one of train, got 'test'"):
        load_benchmark("nq", source=folder)


@pytest.mark.parametrize("source", ["RUC-NLPIR/FlashRAG_datasets", "missing"])
def test_a_missing_folder_is_not_looked_for_on_the_hub(source):
    with pytest.raises(FileNotFoundError, match=f"source must be an existing folder, got '{source}'"):
        load_benchmark("nq", source=source)
