from __future__ import annotations

import pytest

from sorl_trl.qa import Question
from sorl_trl.qa.benchmark_rows import (
    UnusableRow,
    parse_flashrag,
    parse_medmcqa,
    parse_medqa,
    parse_pubmedqa,
    parse_search_r1,
)
from tests.unit.qa import rows


def test_flashrag():
    question = parse_flashrag(rows.FLASHRAG | {"data_source": "nq"})
    assert question == Question("test_0", "who wrote it?", ("Ann", "Ann Lee"), {"type": "bridge"}, data_source="nq")
    assert parse_flashrag(rows.FLASHRAG | {"data_source": "nq", "metadata": None}).metadata == {}
    without = {name: value for name, value in rows.FLASHRAG.items() if name != "metadata"}
    assert parse_flashrag(without | {"data_source": "nq"}).metadata == {}


def test_blank_golden_answers_are_left_out():
    row = rows.FLASHRAG | {"data_source": "nq", "golden_answers": ["", "Ann", " "]}
    assert parse_flashrag(row).golden_answers == ("Ann",)


def test_search_r1_ids_name_their_source():
    question = parse_search_r1(rows.SEARCH_R1)
    assert (question.id, question.data_source) == ("hotpotqa-train_0", "hotpotqa")
    assert (question.question, question.golden_answers) == ("who wrote it?", ("Ann",))


def test_medqa():
    question = parse_medqa(rows.MEDQA | {"id": "test_0", "data_source": "medqa"})
    assert question == Question(
        "test_0",
        "Which drug?",
        ("Vitamin C",),
        {"answer": "Vitamin C", "meta_info": "step1", "metamap_phrases": ["drug", "which"]},
        {"A": "Aspirin", "B": "Biotin", "C": "Vitamin C", "D": "Dopamine"},
        "medqa",
    )


def test_medqa_letters_that_only_other_rows_have():
    options = {"A": "yes", "B": "no", "C": None}
    row = rows.MEDQA | {"id": "1", "data_source": "medqa", "options": options, "answer_idx": "B"}
    assert parse_medqa(row).options == {"A": "yes", "B": "no"}


@pytest.mark.parametrize(("cop", "text"), [(0, "one"), (3, "four")])
def test_medmcqa_counts_from_zero(cop, text):
    question = parse_medmcqa(rows.MEDMCQA | {"cop": cop, "data_source": "medmcqa"})
    assert question.golden_answers == (text,)
    assert question.options == {"A": "one", "B": "two", "C": "three", "D": "four"}
    about = {"exp": "because", "choice_type": "single", "subject_name": "Anatomy", "topic_name": None}
    assert question.metadata == about


def test_medmcqa_repeated_texts():
    wrong_repeated = rows.MEDMCQA | {"opa": "two", "opb": "two", "cop": 2, "data_source": "medmcqa"}
    assert parse_medmcqa(wrong_repeated).golden_answers == ("three",)
    with pytest.raises(UnusableRow, match="the right option's text is another option's too"):
        parse_medmcqa(wrong_repeated | {"cop": 1})


@pytest.mark.parametrize(("decision", "letter"), [("yes", "A"), ("no", "B"), ("maybe", "C")])
def test_pubmedqa(decision, letter):
    question = parse_pubmedqa(rows.PUBMEDQA | {"final_decision": decision, "id": "?", "data_source": "pubmedqa"})
    assert (question.id, question.golden_answers) == ("21645374", (decision,))
    assert question.options == {"A": "yes", "B": "no", "C": "maybe"}
    assert question.options[letter] == decision
    assert "programmed" not in question.question
    assert question.metadata == {"context": rows.PUBMEDQA["context"], "long_answer": "It seems so."}


@pytest.mark.parametrize(
    ("parse", "row", "message"),
    [
        (parse_flashrag, rows.FLASHRAG | {"question": " "}, "`question` is blank"),
        (parse_flashrag, rows.FLASHRAG | {"golden_answers": []}, "`golden_answers` is empty"),
        (parse_flashrag, rows.FLASHRAG | {"golden_answers": None}, "`golden_answers` is empty"),
        (parse_flashrag, rows.FLASHRAG | {"golden_answers": ["", " "]}, "`golden_answers` is empty"),
        (parse_medqa, rows.MEDQA | {"options": {"A": "x", "B": "", "C": "y"}}, "`B` is blank"),
        (parse_medqa, rows.MEDQA | {"answer_idx": ""}, "`answer_idx` is blank"),
        (parse_medmcqa, rows.MEDMCQA | {"cop": -1}, "`cop` is no label"),
        (parse_medmcqa, rows.MEDMCQA | {"cop": None}, "`cop` is no label"),
        (parse_medmcqa, rows.MEDMCQA | {"opd": None}, "`opd` is blank"),
        (parse_pubmedqa, rows.PUBMEDQA | {"final_decision": None}, "`final_decision` is blank"),
    ],
)
def test_unusable_rows(parse, row, message):
    with pytest.raises(UnusableRow, match=f"^{message}$"):
        parse({"id": "1", "data_source": "set"} | row)
