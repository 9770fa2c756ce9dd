"""Questions with their golden answers, in FlashRAG's file schema."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Question:
    """One question. Any of `golden_answers` is right; `metadata` is whatever the data set adds, such as `hops`."""

    id: str
    question: str
    golden_answers: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)


def load_questions(path: str | os.PathLike[str]) -> list[Question]:
    """Read a JSONL file of `{"id", "question", "golden_answers", "metadata"}` lines; `metadata` may be missing.

    Raises:
        ValueError: The file holds no line, or a line is not a question; the message names the file and the line.
        FileNotFoundError: There is no such file.
    """
    questions = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
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
            record = {
                "id": question.id,
                "question": question.question,
                "golden_answers": list(question.golden_answers),
                "metadata": dict(question.metadata),
            }
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
        id=_identifier(record.get("id")),
        question=_text("question", record.get("question")),
        golden_answers=_golden_answers(record.get("golden_answers")),
        metadata=_metadata(record.get("metadata")),
    )


def _identifier(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"`id` must be a string or an integer, got {value!r}")
    return str(value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"`{name}` must be a string that is not blank, got {value!r}")
    value.encode()  # Half a surrogate pair, which JSON can spell, cannot be encoded by any tokenizer.
    return value


def _golden_answers(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"`golden_answers` must be a list of at least one string, got {value!r}")
    return tuple(_text("golden_answers", answer) for answer in value)


def _metadata(value: object) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"`metadata` must be an object or missing, got {value!r}")
    return value or {}
