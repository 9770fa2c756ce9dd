"""Questions with their golden answers, in FlashRAG's file schema, with options for multiple choice."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sorl_trl.qa.choices import right_letter
from sorl_trl.text import identifier, json_object


@dataclass(frozen=True)
class Question:
    """A question with its golden answers: the row type of all datasets.

    Raises:
        ValueError: There are options, but `golden_answers` is not the text of exactly one of them, or a letter is not
            one of A to Z.
    """

    id: str
    question: str
    golden_answers: tuple[str, ...]
    """Right answers. A multiple-choice question has one, the text of the right option instead of its letter."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the dataset adds, such as `hops`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Texts by letter, in the order in which they are shown; empty for an open question."""
    data_source: str = ""
    """Name of the dataset, empty if unknown."""

    def __post_init__(self) -> None:
        if self.options:
            if wrong := [letter for letter in self.options if not re.fullmatch("[A-Z]", letter)]:
                raise ValueError(f"`options` must have the letters A to Z as keys, got {wrong[0]!r}")
            right_letter(self.golden_answers, self.options)


def load_questions(path: str | os.PathLike[str]) -> list[Question]:
    """Read a JSONL file of `{"id", "question", "golden_answers", "metadata", "options", "data_source"}` lines.

    The last three fields may be missing; blank lines are skipped.

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
            record = {each.name: getattr(question, each.name) for each in fields(Question)}
            file.write(json.dumps(record, ensure_ascii=False, default=dict) + "\n")


def text(name: str, value: object) -> str:
    """Check that a value is a string that is not blank and can be encoded; otherwise a ValueError names the field."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"`{name}` must be a string that is not blank, got {value!r}")
    value.encode()  # Half a surrogate pair, which JSON can spell, cannot be encoded by any tokenizer.
    return value


def mapping(name: str, value: object) -> dict[str, Any]:
    """Check that a value is an object, or replace None by an empty one; otherwise a ValueError names the field."""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"`{name}` must be an object or missing, got {value!r}")
    return value or {}


def _parse(line: bytes) -> Question:
    record = json_object(line, "a question")
    golden_answers = record.get("golden_answers")
    if not isinstance(golden_answers, list) or not golden_answers:
        raise ValueError(f"`golden_answers` must be a list of at least one string, got {golden_answers!r}")
    return Question(
        id=identifier("id", record.get("id")),
        question=text("question", record.get("question")),
        golden_answers=tuple(text("golden_answers", answer) for answer in golden_answers),
        metadata=mapping("metadata", record.get("metadata")),
        options={letter: text("options", each) for letter, each in mapping("options", record.get("options")).items()},
        data_source=str(record.get("data_source") or ""),
    )
