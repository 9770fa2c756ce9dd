from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from sorl_trl.evaluation.arguments import EvaluationArguments
from sorl_trl.evaluation.plan import load_datasets, plan_batches, questions_hash
from sorl_trl.qa import Question, write_questions

QUESTIONS = [Question(str(i), f"question {i} ?", (f"answer {i}",)) for i in range(5)]


def test_samples_of_a_question_are_neighbours_and_batches_never_mix_datasets() -> None:
    batches = plan_batches({"nq": QUESTIONS[:3], "own": QUESTIONS[3:]}, num_samples=2, batch_size=4)
    assert [(batch.dataset, batch.index) for batch in batches] == [("nq", 0), ("nq", 1), ("own", 0)]
    samples = [[(question.id, index) for question, index in batch.samples] for batch in batches]
    assert samples == [
        [("0", 0), ("0", 1), ("1", 0), ("1", 1)],
        [("2", 0), ("2", 1)],
        [("3", 0), ("3", 1), ("4", 0), ("4", 1)],
    ]


def test_the_seed_of_a_batch_depends_on_run_dataset_and_index_alone() -> None:
    alone = plan_batches({"nq": QUESTIONS}, 1, 2)
    beside = plan_batches({"own": QUESTIONS, "nq": QUESTIONS}, 1, 2)
    assert [batch.seed(0) for batch in beside[3:]] == [batch.seed(0) for batch in alone]
    assert len({batch.seed(seed) for batch in beside for seed in (0, 1)}) == 12


def test_the_hash_sees_questions_answers_and_order() -> None:
    other = [replace(QUESTIONS[0], golden_answers=("another",)), *QUESTIONS[1:]]
    assert len({questions_hash(each) for each in (QUESTIONS, QUESTIONS[:4], QUESTIONS[::-1], other)}) == 4
    assert questions_hash(list(QUESTIONS)) == questions_hash(QUESTIONS)


def test_benchmarks_come_from_a_folder_each_and_own_questions_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "sets/bamboogle").mkdir(parents=True)
    rows = [{"id": f"test_{i}", "question": "who ?", "golden_answers": ["Ann"], "metadata": {}} for i in range(3)]
    (tmp_path / "sets/bamboogle/test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_questions(QUESTIONS, tmp_path / "own.jsonl")
    arguments = EvaluationArguments(
        "run", ["bamboogle"], str(tmp_path / "sets"), questions=[str(tmp_path / "own.jsonl")], limit=2
    )
    datasets = load_datasets(arguments)
    assert list(datasets) == ["bamboogle", "own"]
    assert [question.id for question in datasets["bamboogle"]] == ["test_0", "test_1"]
    assert datasets["own"] == QUESTIONS[:2]
