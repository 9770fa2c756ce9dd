"""The multi-turn sets of the Berkeley Function Calling Leaderboard: users with several requests, in eight worlds.

The worlds, the tasks and the calls that solve them come from the package `bfcl-eval`.
"""

from sorl_trl.qa import BFCL, BFCL_BENCHMARKS
from sorl_trl.rollout.environments.bfcl.environment import MOST_STEPS, BFCLEnvironment, BFCLTools
from sorl_trl.rollout.environments.bfcl.questions import (
    FOR_QUESTIONS,
    are_tasks,
    bfcl_questions,
    check_given,
    most_messages,
    names_tasks,
    question_of,
    task_rows,
)
from sorl_trl.rollout.environments.bfcl.tasks import BFCL_SETS, Task, load_tasks, prompt_rows, takes_system, task_of

__all__ = [
    "BFCL",
    "BFCL_BENCHMARKS",
    "BFCL_SETS",
    "FOR_QUESTIONS",
    "MOST_STEPS",
    "BFCLEnvironment",
    "BFCLTools",
    "Task",
    "are_tasks",
    "bfcl_questions",
    "check_given",
    "load_tasks",
    "most_messages",
    "names_tasks",
    "prompt_rows",
    "question_of",
    "takes_system",
    "task_of",
    "task_rows",
]
