from __future__ import annotations

import json

import pytest
from datasets import Dataset

from sorl_trl.qa import SEARCH_R1_TEMPLATE, Question, build_prompt_rows, load_questions, write_questions
from sorl_trl.qa.questions import CHOICE_INSTRUCTION, question_text

RECORD = {"id": "test_0", "question": "Who?", "golden_answers": ["Ann", "Anna"], "metadata": {"hops": 2}}


def write(tmp_path, *lines):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_flashrags_schema_is_read(tmp_path):
    """Blank lines hold no question."""
    [question] = load_questions(write(tmp_path, "", json.dumps(RECORD | {"ignored": 1}), " ", ""))
    assert (question.options, question.data_source) == ({}, "")
    assert question == Question("test_0", "Who?", ("Ann", "Anna"), {"hops": 2})


@pytest.mark.parametrize(
    ("golden_answers", "options"), [(("A",), {"A": "x", "B": "y"}), (("x",), {"a": "x"}), (("x",), {"AB": "x"})]
)
def test_options_must_have_one_right_text(golden_answers, options):
    with pytest.raises(ValueError, match=r"golden_answers|options"):
        Question("1", "Which?", golden_answers, options=options)


@pytest.mark.parametrize(
    "line",
    [
        *["{", "[" * 100_000, "3", b"\xff", json.dumps({"id": 1, "golden_answers": ["Ann"]})],
        *[json.dumps(RECORD | {"question": wrong}) for wrong in (" ", "\ud800")],
        *[json.dumps(RECORD | {"golden_answers": wrong}) for wrong in ([], "Ann", ["Ann", ""])],
        *[json.dumps(RECORD | {"id": True}), json.dumps(RECORD | {"options": {"A": 1}})],
    ],
    ids=range(12),
)
def test_a_bad_line_is_named(tmp_path, line):
    path = write(tmp_path, json.dumps(RECORD), line, json.dumps(RECORD))
    with pytest.raises(ValueError, match=r"questions\.jsonl, line 2: ."):
        load_questions(path)


def test_a_missing_field_is_named_with_those_found_and_a_missing_file_with_its_command(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"needs `golden_answers`, got fields \['answer', 'id', 'question'\]"):
        load_questions(write(tmp_path, json.dumps({"id": 1, "question": "Who?", "answer": "Ann"})))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"runs/quickstart/eval.jsonl.*`python quickstart\.py`"):
        load_questions("runs/quickstart/eval.jsonl")


UNKNOWN = Question("2", "Where?", ("Rome",))
CHOICE = Question("3", "Which?", ("y",), options={"B": "x", "A": "y"}, data_source="medqa")
TWO_LETTERS = Question("4", "Yes?", ("no",), options={"C": "no"}, data_source="pubmedqa")


def test_what_is_written_is_read_back(tmp_path):
    odd = Question('"\\', "\x00 \u2028 \U0001f600\n東京", ("a", " b"), {"hops": [2, None], "": {}})
    questions = [odd, UNKNOWN, CHOICE, TWO_LETTERS]
    write_questions(iter(questions), tmp_path / "questions.jsonl")
    read = load_questions(tmp_path / "questions.jsonl")
    assert read == questions
    assert [list(question.options) for question in read] == [list(question.options) for question in questions]


def test_braces_elsewhere_are_left_alone():
    questions = [Question("1", "What is {x}?", ("y",)), Question("2", "{question}", ("y",))]
    with pytest.raises(ValueError, match="template"):
        build_prompt_rows(questions, "no place")
    rows = build_prompt_rows(questions, 'Give {"answer": 1}. {question}')
    assert [row["prompt"] for row in rows] == ['Give {"answer": 1}. What is {x}?', 'Give {"answer": 1}. {question}']
    assert build_prompt_rows(questions)[0]["prompt"] == SEARCH_R1_TEMPLATE.replace("{question}", "What is {x}?")


def test_options_are_shown_below_the_question_in_their_order():
    assert question_text(UNKNOWN) == "Where?"
    assert question_text(CHOICE) == f"Which?\nB. x\nA. y\n{CHOICE_INSTRUCTION}"
    question = Question("1", "Which?", ("x\nB. y",), options={"A": "x\nB. y", "C": "z"})
    assert question_text(question).splitlines() == ["Which?", "A. x B. y", "C. z", CHOICE_INSTRUCTION]


@pytest.mark.parametrize("conversational", [False, True])
def test_one_template_serves_open_and_multiple_choice_questions(conversational):
    rows = build_prompt_rows([UNKNOWN, CHOICE], "Q: {question}\n", conversational)
    texts = ["Q: Where?\n", f"Q: {question_text(CHOICE)}\n"]
    chats = [[{"role": "user", "content": text}] for text in texts]
    assert [row["prompt"] for row in rows] == (chats if conversational else texts)


@pytest.mark.parametrize("questions", [[CHOICE, UNKNOWN, TWO_LETTERS], [UNKNOWN, TWO_LETTERS, CHOICE]])
def test_options_of_different_letters_make_a_data_set(questions):
    dataset = Dataset.from_list(build_prompt_rows(questions))
    for row, question in zip(dataset, questions, strict=True):
        assert list(dict(row["options"]).items()) == list(question.options.items())
        assert row["data_source"] == question.data_source
