"""Questions with golden answers, in files of FlashRAG's schema, and the prompts made from them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from sorl_trl.files import missing
from sorl_trl.qa.scoring import right_letter
from sorl_trl.text import identifier, json_object

# The protocol of Search-R1 (arXiv 2503.09516), in our own words.
SEARCH_R1_TEMPLATE = (
    "You can look facts up with a search engine before you answer the question at the end.\n"
    "Before every step, think between <think> and </think>. If a fact is missing, ask for it with "
    "<search> your query </search>; the passages found are then shown to you between <information> and "
    "</information>. Search as often as you need. Once you know enough, give the answer alone, without any "
    "explanation, as <answer> your answer </answer>.\n"
    "Question: {question}\n"
)
Row = TypeVar("Row")
CHOICE_INSTRUCTION = "Answer with the letter of the right option."
"""The last line of a multiple-choice question, below its options."""


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
    """Additional columns of the dataset, such as `hops`."""
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
        ValueError: The file is empty, or a line is not a question; the message names the file and the line.
        FileNotFoundError: There is no such file.
    """
    return read_lines(path, lambda line, number: _parse(line))


def read_lines(path: str | os.PathLike[str], parse: Callable[[bytes, int], Row]) -> list[Row]:
    """What `parse` makes of each line of a JSONL file and its number, from 1; blank lines are skipped.

    Raises the errors of `load_questions`.
    """
    if not Path(path).exists():
        raise FileNotFoundError(missing("path", path, "file"))
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                rows += [parse(line, number)] if line.strip() else []
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise ValueError(f"{path}: the file is empty, but needs at least one line with a question or a task")
    return rows


def write_questions(questions: Iterable[Question], path: str | os.PathLike[str]) -> None:
    """Write questions to a JSONL file that `load_questions` reads back unchanged. `metadata` must be JSON's types."""
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for question in questions:
            record = {each.name: getattr(question, each.name) for each in fields(Question)}
            file.write(json.dumps(record, ensure_ascii=False, default=dict) + "\n")


def text(name: str, value: object) -> str:
    """Check that a value is a non-blank string that can be encoded; otherwise, a ValueError names the field."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"`{name}` must be a non-blank string, got {value!r}")
    value.encode()  # Half a surrogate pair, which JSON can spell, cannot be encoded by any tokenizer.
    return value


def mapping(name: str, value: object) -> dict[str, Any]:
    """Check that a value is an object, and replace None with an empty one; otherwise, a ValueError names the field."""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"`{name}` must be an object or missing, got {value!r}")
    return value or {}


def _parse(line: bytes) -> Question:
    record = json_object(line, "a question", needs=("id", "question", "golden_answers"))
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


def question_text(question: Question) -> str:
    """Return the text that replaces "{question}" in a template.

    This is the question itself or, if it has options, the question, the options one per line as "A. text", and
    `CHOICE_INSTRUCTION`. One template thus serves both open and multiple-choice questions.
    """
    if not question.options:
        return question.question
    # An option of several lines would look like several options.
    options = [f"{letter}. {' '.join(text.split())}" for letter, text in question.options.items()]
    return "\n".join([question.question, *options, CHOICE_INSTRUCTION])


def build_prompt_rows(
    questions: Iterable[Question],
    template: str = SEARCH_R1_TEMPLATE,
    conversational: bool = False,
    clean: Callable[[str], str] = str,
) -> list[dict[str, Any]]:
    """Make the rows of a training set, for `datasets.Dataset.from_list`.

    Args:
        questions: Open and multiple-choice questions, which may be mixed.
        template: The instructions, with "{question}" where the `question_text` goes. Other braces are unchanged.
        conversational: Whether to make chat prompts of one user message instead of text prompts.
        clean: A function applied first to the text of each question. `sorl_trl.rollout.Sanitizer(tokenizer).clean`
            prevents text such as `<|im_end|>` in a question from becoming control tokens.

    Returns:
        Rows of `prompt`, `question_id`, `question`, `golden_answers`, `data_source`. If any question has options,
        every row has `options`: a list of [letter, text] pairs, empty for an open question. All rows have the same
        columns, because `from_list` takes them from the first row.

    Raises:
        ValueError: `template` has no "{question}".
    """
    if "{question}" not in template:
        raise ValueError(f'template must contain "{{question}}", got {template!r}')
    questions = list(questions)
    with_options = any(question.options for question in questions)
    rows: list[dict[str, Any]] = []
    for question in questions:
        prompt = template.replace("{question}", clean(question_text(question)))
        row: dict[str, Any] = {
            "prompt": [{"role": "user", "content": prompt}] if conversational else prompt,
            "question_id": question.id,
            "question": question.question,
            "golden_answers": list(question.golden_answers),
            "data_source": question.data_source,
        }
        if with_options:
            # Pairs, because a column of mappings gets the letters of all rows, with `None` for those that a row lacks.
            row["options"] = [list(pair) for pair in question.options.items()]
        rows.append(row)
    return rows
