from __future__ import annotations

import pytest
from datasets import Dataset

from sorl_trl.qa import SEARCH_R1_TEMPLATE, Question, build_prompt_rows
from sorl_trl.qa.prompts import CHOICE_INSTRUCTION, question_text

ONE_HOP = Question("1", "Who?", ("Ann", "Anna"), {"hops": 1})
UNKNOWN = Question("2", "Where?", ("Rome",))
CHOICE = Question("3", "Which?", ("y",), options={"B": "x", "A": "y"}, data_source="medqa")
TWO_LETTERS = Question("4", "Yes?", ("no",), options={"C": "no"}, data_source="pubmedqa")


def test_braces_elsewhere_are_left_alone():
    questions = [Question("1", "What is {x}?", ("y",)), Question("2", "{question}", ("y",))]
    rows = build_prompt_rows(questions, 'Give {"answer": 1}. {question}')
    assert [row["prompt"] for row in rows] == ['Give {"answer": 1}. What is {x}?', 'Give {"answer": 1}. {question}']
    assert build_prompt_rows(questions)[0]["prompt"] == SEARCH_R1_TEMPLATE.replace("{question}", "What is {x}?")


@pytest.mark.parametrize("template", ["", "no place", "{Question}"])
def test_a_template_needs_a_place_for_the_question(template):
    with pytest.raises(ValueError, match=f'template must hold "{{question}}", got {template!r}'):
        build_prompt_rows([ONE_HOP], template)


def test_options_are_shown_below_the_question_in_their_order():
    assert question_text(UNKNOWN) == "Where?"
    assert question_text(CHOICE) == f"Which?\nB. x\nA. y\n{CHOICE_INSTRUCTION}"
    assert "letter" in CHOICE_INSTRUCTION


def test_an_option_stays_on_its_line():
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
