"""Turns a row of a public dataset into a `Question`, with a pure function for each schema.

A row is a mapping from column to value. Each parser raises a KeyError or a ValueError that names the field if the row
is not in its schema, and `UnusableRow` if it is, but gives no question with an answer. The loader adds the columns
`id` and `data_source` if a set lacks them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sorl_trl.qa.questions import Question, mapping, text
from sorl_trl.text import identifier

Row = Mapping[str, Any]
RowParser = Callable[[Row], Question]

_DECISIONS = {"A": "yes", "B": "no", "C": "maybe"}


class UnusableRow(ValueError):
    """A row without one clear answer, or with a required text blank. The message gives the reason, but no values."""


def parse_flashrag(row: Row) -> Question:
    """FlashRAG: `id, question, golden_answers, metadata`, of which `metadata` may be missing or `None`."""
    return Question(
        id=identifier("id", row["id"]),
        question=_text(row, "question"),
        golden_answers=_answers("golden_answers", row["golden_answers"]),
        metadata=mapping("metadata", row.get("metadata")),
        data_source=_text(row, "data_source"),
    )


def parse_search_r1(row: Row) -> Question:
    """Search-R1: FlashRAG's columns, and verl's with the same content, which are ignored.

    The set is a mixture whose ids repeat between sources, so each id is prefixed with the name of its source.
    """
    question = parse_flashrag(row)
    return replace(question, id=f"{question.data_source}-{question.id}")


def parse_medqa(row: Row) -> Question:
    """MedQA: `question, options{A…}, answer_idx`, a letter; the other columns become metadata."""
    letters = [letter for letter, each in row["options"].items() if each is not None]  # others may have more
    options = {letter: _text(row["options"], letter) for letter in letters}
    right = _text(row, "answer_idx")
    if right not in options:
        raise ValueError(f"`answer_idx` must be one of {letters}, got {right!r}")
    return _choice(row, options, options[right], "answer_idx")


def parse_medmcqa(row: Row) -> Question:
    """MedMCQA: `question, opa, opb, opc, opd, cop`; the other columns become metadata.

    `cop` counts from 0; -1 or `None` means that the question has no label.
    """
    columns = ("opa", "opb", "opc", "opd")
    cop = row["cop"]
    if cop in (None, -1):
        raise UnusableRow("`cop` is no label")
    if isinstance(cop, bool) or not isinstance(cop, int) or cop not in range(len(columns)):
        raise ValueError(f"`cop` must be 0 to 3, counted from 0, or -1 for no label, got {cop!r}")
    options = {letter: _text(row, column) for letter, column in zip("ABCD", columns, strict=True)}
    return _choice(row, options, options["ABCD"[cop]], "cop", *columns)


def parse_pubmedqa(row: Row) -> Question:
    """PubMedQA: `pubid, question, final_decision` of yes, no and maybe, which become the options A, B and C.

    The abstract in `context` is not shown, because the agent should search; it becomes metadata, like other columns.
    """
    row = {**row, "id": identifier("pubid", row["pubid"])}
    return _choice(row, _DECISIONS, _text(row, "final_decision"), "pubid", "final_decision")


def _choice(row: Row, options: Mapping[str, str], right: str, *used: str) -> Question:
    """A multiple-choice question with the text of its right option; the columns not `used` become metadata."""
    if list(options.values()).count(right) > 1:
        raise UnusableRow("the right option's text is another option's too")
    known = {"id", "question", "options", "data_source", *used}
    return Question(
        id=identifier("id", row["id"]),
        question=_text(row, "question"),
        golden_answers=(right,),
        metadata={name: value for name, value in row.items() if name not in known},
        options=dict(options),
        data_source=_text(row, "data_source"),
    )


def _text(row: Row, name: str) -> str:
    value = row[name]
    if value is None or (isinstance(value, str) and not value.strip()):
        raise UnusableRow(f"`{name}` is blank")
    return text(name, value).strip()


def _answers(name: str, value: object) -> tuple[str, ...]:
    """The golden answers without blank ones, which no answer could match."""
    if value is None:
        raise UnusableRow(f"`{name}` is empty")
    if not isinstance(value, list) or not all(isinstance(answer, str) for answer in value):
        raise ValueError(f"`{name}` must be a list of strings, got {value!r}")
    answers = tuple(answer for answer in value if answer.strip())
    if not answers:
        raise UnusableRow(f"`{name}` is empty")
    return answers
