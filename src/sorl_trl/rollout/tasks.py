"""Tasks: rows with a user's own columns, for recipes that replace the search engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sorl_trl.files import missing
from sorl_trl.qa import Question, build_prompt_rows, load_questions
from sorl_trl.qa.questions import mapping, read_lines
from sorl_trl.rollout.observation import Sanitizer
from sorl_trl.rollout.options import RolloutArguments
from sorl_trl.search import SearchArguments
from sorl_trl.text import identifier, json_object

FOR_SEARCH = ("protocol", "search_top_k", *(each.name for each in fields(SearchArguments)))
"""Arguments that apply only if the policy searches."""
FOR_QUESTIONS = ("prompt_template", "chat")
"""Arguments that do not apply to tasks with their own prompts, nor to agents, which write theirs."""
FOR_COLLECTOR = ("max_turns", "max_observation_tokens")
"""Arguments that apply only where this package encodes replies to the policy."""
FOR_AGENT = ("agent_time_limit_s", "reward_on_error")
"""Arguments that apply only to an `agent` or an `agent_command`."""


@dataclass(frozen=True)
class Task(Question):
    """A row of a user's file. `metadata` has its columns, except `prompt`, `golden_answers` and `options`."""

    prompt: str | tuple[Mapping[str, Any], ...] | None = None
    """Text or messages that replace the template with the question."""


def check_questions(name: str, path: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError, which names the argument, if a file of questions does not exist."""
    if not Path(path).is_file():
        sets = "" if Path(path).suffix else "; examples/public_questions.py writes public sets to files"
        raise FileNotFoundError(f"{missing(name, path, 'file')}{sets}")


def load_rows(path: str | os.PathLike[str], rollout: RolloutArguments) -> list[Question]:
    """Load the policy's tasks from a file: questions, or general tasks if `rollout` does not search.

    Raises the errors of `load_questions` and `load_tasks`.
    """
    return load_questions(path) if rollout.searches else [*load_tasks(path)]


def load_tasks(path: str | os.PathLike[str]) -> list[Task]:
    """Read a JSONL file whose lines have a `prompt` (text or messages) or a `question`, and any other columns.

    A row without an `id` gets the number of its line.

    Raises:
        ValueError: The file is empty, or a line is not a valid row; the message names the file and the line.
        FileNotFoundError: There is no such file.
    """
    return read_lines(path, lambda line, number: _task(json_object(line, "a task"), number))


def _task(record: dict[str, Any], number: int) -> Task:
    prompt = record.get("prompt")
    if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple | None):
        raise ValueError(f"`prompt` must be text or a list of messages with `role` and `content`, got {prompt!r}")
    question = record.get("question") or (prompt[-1]["content"] if isinstance(prompt, tuple) else prompt)
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"a task needs a `prompt` or a `question`, got fields {sorted(record)}")
    golden_answers = record.get("golden_answers") or []
    if not isinstance(golden_answers, list) or not all(isinstance(each, str) for each in golden_answers):
        raise ValueError(f"`golden_answers` must be a list of strings or missing, got {golden_answers!r}")
    return Task(
        id=identifier("id", record.get("id", number)),
        question=question,
        golden_answers=tuple(golden_answers),
        metadata={name: each for name, each in record.items() if name not in ("prompt", "golden_answers", "options")},
        options=mapping("options", record.get("options")),
        data_source=str(record.get("data_source") or ""),
        prompt=prompt,
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def prompt_rows(
    questions: Sequence[Question], rollout: RolloutArguments, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Make the rows of a dataset. Control tokens that messages and questions spell out are neutralized.

    Without a search, each row has all columns that any row has, with None where it lacks one. A question's prompt for
    an agent is the question itself.

    Raises ValueError if some prompts are text and others are messages, or messages lack a chat template.
    """
    clean = Sanitizer(tokenizer).clean
    template = "{question}" if rollout.has_agent else rollout.prompt_template
    rows = build_prompt_rows(questions, template, rollout.chat, clean)
    if not rollout.searches:
        names = dict.fromkeys(name for question in questions for name in question.metadata)
        for row, question in zip(rows, questions, strict=True):
            row |= {name: question.metadata.get(name, row.get(name)) for name in names}
            if isinstance(question, Task) and question.prompt is not None:
                row["prompt"] = _cleaned(question.prompt, clean)
    kinds = {isinstance(row["prompt"], str) for row in rows}
    if len(kinds) > 1:
        raise ValueError("some prompts are text and others are messages: `chat` turns questions into messages")
    rollout.check_template(tokenizer, conversational=kinds == {False})
    return rows


def _cleaned(prompt: str | Sequence[Mapping[str, Any]], clean: Any) -> Any:
    """Text is used as is, because it may need control tokens. In messages, the chat template writes those."""
    if isinstance(prompt, str):
        return prompt
    return [{**message, "content": clean(message["content"])} for message in prompt]


def unread(rollout: RolloutArguments) -> tuple[str, ...]:
    """Arguments that do not apply to a run's actor, whatever its tasks are."""
    if rollout.searches:
        return FOR_AGENT
    if rollout.environment:
        return FOR_SEARCH + FOR_AGENT
    return FOR_SEARCH + FOR_COLLECTOR + FOR_QUESTIONS


def check_read(rollout: RolloutArguments, questions: Sequence[Question], given: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that was given but does not apply to the policy's tasks."""
    asks_itself = all(isinstance(each, Task) and each.prompt is not None for each in questions)
    without = dict.fromkeys(FOR_QUESTIONS if asks_itself else (), "the prompts of the rows")
    without |= dict.fromkeys(unread(rollout), rollout.actor or "a search engine")
    for name, reader in without.items():
        if given.get(name):
            raise ValueError(f"`{name}` is {given[name]!r}, but has no effect with {reader}: leave it out.")
