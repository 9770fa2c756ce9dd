"""The leaderboard's tasks as rows of a dataset, for recipes and evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from transformers import PreTrainedTokenizerBase

from sorl_trl.qa import BENCHMARKS, BFCL, BFCL_BENCHMARKS, Question, load_questions
from sorl_trl.rollout.environments.bfcl.environment import MOST_STEPS
from sorl_trl.rollout.environments.bfcl.tasks import Task, load_tasks, prompt_rows, takes_system, task_of
from sorl_trl.rollout.observation import Sanitizer
from sorl_trl.search import SearchArguments

FOR_QUESTIONS = ("prompt_template", "chat", "search_top_k", "data_source_folder")
"""Arguments that have no meaning for tasks, in addition to those of the search engine."""


def bfcl_questions(name: str) -> list[Question]:
    """Load the tasks of a set of `BFCL_BENCHMARKS`. Raises ImportError if the package is missing."""
    return [question_of(task) for task in load_tasks(name.removeprefix(f"{BFCL}_"))]


def question_of(task: Task) -> Question:
    """Make the row of a task: its first request, the calls that solve it, and its worlds."""
    return Question(
        id=task.id,
        question=task.requests[0],
        golden_answers=("\n".join(", ".join(calls) or "-" for calls in task.solution),),
        metadata={"worlds": list(task.worlds), "requests": len(task.requests)},
        data_source=f"bfcl_{task.id.rpartition('_')[0]}",
    )


def are_tasks(questions: Sequence[Question]) -> bool:
    """Whether the rows are tasks of the leaderboard.

    Raises ValueError if only some of them are, or if a task's request is not the leaderboard's.
    """
    kinds = {question.data_source in BFCL_BENCHMARKS for question in questions}
    if len(kinds) > 1:
        raise ValueError("questions and tasks of the leaderboard need runs of their own")
    if kinds != {True}:
        return False
    if changed := [each.id for each in questions if each.question != task_of(each.id).requests[0]]:
        raise ValueError(f"the task {changed[0]!r} asks for something else than the leaderboard's of that id")
    return True


def check_given(given: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that was given but has no meaning for tasks."""
    for name in (*FOR_QUESTIONS, *(field.name for field in fields(SearchArguments))):
        if given.get(name):
            raise ValueError(
                f"`{name}` is {given[name]!r}, but is for questions: tasks of the leaderboard have prompts and "
                "functions of their own. Leave it out, or name another recipe (`--config`)"
            )


def task_rows(
    questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase, compact: bool
) -> list[dict[str, Any]]:
    """Make the prompts of tasks for a chat template, without any control tokens that they spell out."""
    clean = Sanitizer(tokenizer).clean
    rows = prompt_rows([task_of(question.id) for question in questions], compact, takes_system(tokenizer))
    for message in (message for row in rows for message in row["prompt"]):
        message["content"] = clean(message["content"])
    return rows


def most_messages(tasks: Sequence[Question]) -> int:
    """How many messages of the policy the longest of the tasks allows."""
    return (MOST_STEPS + 1) * max(len(task_of(task.id).requests) for task in tasks)


def names_tasks(source: str) -> bool:
    """Whether a file or a public dataset holds tasks. Raises the errors of `load_questions` and `are_tasks`."""
    return source in BFCL_BENCHMARKS or (source not in BENCHMARKS and are_tasks(load_questions(source)))
