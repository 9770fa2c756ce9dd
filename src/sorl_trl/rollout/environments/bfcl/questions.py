"""The leaderboard's tasks as rows of a data set, for recipes and evaluations."""

from __future__ import annotations

from collections.abc import Sequence

from sorl_trl.qa import BENCHMARKS, BFCL, BFCL_BENCHMARKS, Question, load_questions
from sorl_trl.rollout.environments.bfcl.tasks import Task, load_tasks


def bfcl_questions(name: str) -> list[Question]:
    """The tasks of a set of `BFCL_BENCHMARKS`. Raises ImportError where the package is missing."""
    return [question_of(task) for task in load_tasks(name.removeprefix(f"{BFCL}_"))]


def question_of(task: Task) -> Question:
    """The row of a task: its first request, the calls that solve it, the worlds that it is about."""
    return Question(
        id=task.id,
        question=task.requests[0],
        golden_answers=("\n".join(", ".join(calls) or "-" for calls in task.solution),),
        metadata={"worlds": list(task.worlds), "requests": len(task.requests)},
        data_source=f"bfcl_{task.id.rpartition('_')[0]}",
    )


def are_tasks(questions: Sequence[Question]) -> bool:
    """Whether rows are tasks of the leaderboard. Raises ValueError where some are, and some are not."""
    kinds = {question.data_source in BFCL_BENCHMARKS for question in questions}
    if len(kinds) > 1:
        raise ValueError("questions and tasks of the leaderboard need runs of their own")
    return kinds == {True}


def names_tasks(source: str) -> bool:
    """Whether a file or a public set holds tasks. Raises what `load_questions` and `are_tasks` raise."""
    return source in BFCL_BENCHMARKS or (source not in BENCHMARKS and are_tasks(load_questions(source)))
