"""Questions with their golden answers, in FlashRAG's file schema, with options for multiple choice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sorl_trl.qa import fields
from sorl_trl.qa.choices import check_options, right_letter


@dataclass(frozen=True)
class Question:
    """A question with its golden answers: the row type of all data sets.

    Raises:
        ValueError: There are options, and `golden_answers` is not the text of exactly one of them, or a letter is not
            one of A to Z, or a text is blank.
    """

    id: str
    question: str
    golden_answers: tuple[str, ...]
    """Any of them is right. Of a multiple-choice question: one, the text of the right option, never its letter."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the data set adds, such as `hops`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Letter -> text, in the order in which they are shown; empty for an open question."""
    data_source: str = ""
    """Name of the data set, empty where it is not known."""

    def __post_init__(self) -> None:
        if self.options:
            check_options(self.options)
            right_letter(self.golden_answers, self.options)


def load_questions(path: str | os.PathLike[str]) -> list[Question]:
    """Read a JSONL file of `{"id", "question", "golden_answers", "metadata", "options", "data_source"}` lines.

    The last three fields may be missing; blank lines hold no question.

    Raises:
        ValueError: The file holds no question, or a line is not a question; the message names the file and the line.
        FileNotFoundError: There is no such file.
    """
    questions = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                questions.append(_parse(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not questions:
        raise ValueError(f"{path}: the file is empty; it needs at least one line with a question")
    return questions


def write_questions(questions: Iterable[Question], path: str | os.PathLike[str]) -> None:
    """Write questions to a JSONL file that `load_questions` reads back unchanged. `metadata` must be JSON's types."""
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for question in questions:
            record: dict[str, object] = {
                "id": question.id,
                "question": question.question,
                "golden_answers": list(question.golden_answers),
            }
            may_be_missing = {
                "metadata": dict(question.metadata),
                "options": dict(question.options),
                "data_source": question.data_source,
            }
            record |= {name: value for name, value in may_be_missing.items() if value}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _parse(line: bytes) -> Question:
    text = line.decode("utf-8")
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a question must be a JSON object, got {type(record).__name__}")
    return Question(
        id=fields.identifier("id", record.get("id")),
        question=fields.text("question", record.get("question")),
        golden_answers=_golden_answers(record.get("golden_answers")),
        metadata=_object("metadata", record.get("metadata")),
        options={
            letter: fields.text("options", text) for letter, text in _object("options", record.get("options")).items()
        },
        data_source=_data_source(record.get("data_source")),
    )


def _golden_answers(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"`golden_answers` must be a list of at least one string, got {value!r}")
    return tuple(fields.text("golden_answers", answer) for answer in value)


def _object(name: str, value: object) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"`{name}` must be an object or missing, got {value!r}")
    return value or {}


def _data_source(value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"`data_source` must be a string or missing, got {value!r}")
    return value or ""
