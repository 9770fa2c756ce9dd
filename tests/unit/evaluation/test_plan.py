from __future__ import annotations

from dataclasses import replace

from sorl_trl.evaluation.plan import plan_batches, questions_hash
from sorl_trl.qa import Question

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
