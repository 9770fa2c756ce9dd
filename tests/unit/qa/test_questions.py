from __future__ import annotations

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sorl_trl.qa import Question, load_questions, write_questions

RECORD = {"id": "test_0", "question": "Who?", "golden_answers": ["Ann", "Anna"], "metadata": {"hops": 2}}


def write(tmp_path, *lines):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_flashrags_schema_is_read(tmp_path):
    [question] = load_questions(write(tmp_path, json.dumps(RECORD | {"ignored": 1})))
    assert (question.options, question.data_source) == ({}, "")
    assert question == Question("test_0", "Who?", ("Ann", "Anna"), {"hops": 2})


def test_options_and_data_source_are_read(tmp_path):
    record = RECORD | {"golden_answers": ["x"], "options": {"B": "y", "A": "x"}, "data_source": "medqa"}
    [question] = load_questions(write(tmp_path, json.dumps(record)))
    assert list(question.options.items()) == [("B", "y"), ("A", "x")]
    assert question.data_source == "medqa"


@pytest.mark.parametrize(
    ("golden_answers", "options", "message"),
    [
        (("A",), {"A": "x", "B": "y"}, "`golden_answers` must be one text"),
        (("x",), {"a": "x"}, "letters A to Z as keys, got 'a'"),
        (("x",), {"AB": "x"}, "letters A to Z as keys, got 'AB'"),
    ],
)
def test_options_must_have_one_right_text(golden_answers, options, message):
    with pytest.raises(ValueError, match=message):
        Question("1", "Which?", golden_answers, options=options)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "recursion"),
        ("3", "must be a JSON object, got int"),
        (b"\xff", "invalid start byte"),
        (json.dumps(RECORD | {"id": None}), "`id` must be a string or an integer, got None"),
        (json.dumps(RECORD | {"id": True}), "`id` must be a string or an integer, got True"),
        (json.dumps(RECORD | {"question": " "}), "`question` must be a string that is not blank, got ' '"),
        (json.dumps(RECORD | {"question": "\ud800"}), "surrogates not allowed"),
        (json.dumps(RECORD | {"golden_answers": []}), r"`golden_answers` must be a list .* got \[\]"),
        (json.dumps(RECORD | {"golden_answers": "Ann"}), "`golden_answers` must be a list .* got 'Ann'"),
        (json.dumps(RECORD | {"golden_answers": ["Ann", ""]}), "`golden_answers` must be .* not blank, got ''"),
        (json.dumps(RECORD | {"metadata": [1]}), r"`metadata` must be an object or missing, got \[1\]"),
        (json.dumps(RECORD | {"options": ["x"]}), r"`options` must be an object or missing, got \['x'\]"),
        (json.dumps(RECORD | {"options": {"A": 1}}), "`options` must be a string that is not blank, got 1"),
        (json.dumps({"id": 1, "golden_answers": ["Ann"]}), "`question` must be .* got None"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path, json.dumps(RECORD), line, json.dumps(RECORD))
    with pytest.raises(ValueError, match=f"questions.jsonl, line 2: .*{message}"):
        load_questions(path)


def test_a_blank_line_holds_no_question(tmp_path):
    assert len(load_questions(write(tmp_path, "", json.dumps(RECORD), " ", ""))) == 1


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
metadata = st.dictionaries(texts, st.one_of(texts, st.integers(), st.none(), st.lists(texts)))


open_questions = st.builds(Question, texts, texts, st.lists(texts, min_size=1).map(tuple), metadata)


@st.composite
def choice_questions(draw):
    options = draw(st.dictionaries(st.sampled_from("ABCDE"), texts, min_size=1))
    unique = [text for text in options.values() if list(options.values()).count(text) == 1]
    assume(unique)
    golden_answers = (draw(st.sampled_from(unique)),)
    return Question(draw(texts), draw(texts), golden_answers, options=options, data_source=draw(texts))


@settings(deadline=None)
@given(st.lists(open_questions | choice_questions(), min_size=1))
def test_what_is_written_is_read_back(tmp_path_factory, questions):
    path = tmp_path_factory.mktemp("round-trip") / "questions.jsonl"
    write_questions(iter(questions), path)
    read = load_questions(path)
    assert read == questions
    assert [list(question.options) for question in read] == [list(question.options) for question in questions]
