"""The tasks of the leaderboard's multi-turn sets, and their rows, which this command writes:

python -m examples.bfcl.tasks tasks.jsonl --sets base miss_param --compact
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from examples.bfcl.calls import read_calls
from sorl_trl.checks import check_choice

BFCL_SETS = ("base", "miss_func", "miss_param", "long_context")
_INSTALL = "python -m pip install --no-deps bfcl-eval==2026.3.23"
_PREFIX = "multi_turn_"
_COMPACT = (
    "You call functions for the user. To call some, write a list of calls and nothing else, such as [f(a=1), "
    "g(b='x')]. Their results come back. Once the user has what they asked for, say so.\nFunctions:\n"
)


@dataclass(frozen=True)
class Task:
    """What a user asks for, request by request, and the calls that solve it."""

    id: str
    """For example "multi_turn_base_0"."""
    requests: tuple[str, ...]
    """The user's messages, one per request."""
    worlds: tuple[str, ...]
    """The classes whose functions the policy may call."""
    state: Mapping[str, Any]
    """The initial state of each world."""
    solution: tuple[tuple[str, ...], ...]
    """The calls that solve each request; none for a request that cannot be solved yet."""
    functions: tuple[Mapping[str, Any], ...]
    """The documents of the functions that the prompt describes."""
    later: Mapping[int, tuple[Mapping[str, Any], ...]]
    """The documents that a later request adds, by the number of the request."""

    @property
    def long_context(self) -> bool:
        """Whether the worlds are filled with irrelevant data."""
        return "long_context" in self.id

    def shortened(self, requests: int) -> Task:
        """The task up to the given number of requests, with only the functions that solve these, and their worlds.

        Its id ends with the number, as in "multi_turn_base_0:2". Raises ValueError if it has fewer requests.
        """
        if not 1 <= requests <= len(self.requests):
            raise ValueError(f"requests={requests} must be 1 to {len(self.requests)}, of {self.id}")
        solution = self.solution[:requests]
        needed = {call.name for calls in solution for text in calls for call in read_calls(text)}
        by_world = {world: {each["name"] for each in _functions(world)} for world in self.worlds}
        return replace(
            self,
            id=f"{self.id}:{requests}",
            requests=self.requests[:requests],
            worlds=tuple(world for world, names in by_world.items() if names & needed),
            solution=solution,
            functions=tuple(each for each in self.functions if each["name"] in needed),
            later={number: documents for number, documents in self.later.items() if number < requests},
        )


def package(name: str) -> Any:
    """Import a module of `bfcl-eval`. Raises an ImportError that explains how to install it."""
    if find_spec("bfcl_eval") is None:
        raise ImportError(f"the leaderboard's worlds need: {_INSTALL}")
    return import_module(f"bfcl_eval.{name}")


@cache
def load_tasks(name: str) -> tuple[Task, ...]:
    """Load the 200 tasks of a set of `BFCL_SETS`, in the package's order.

    Raises ValueError for another name, and ImportError if the package is missing.
    """
    check_choice("name", name, BFCL_SETS)
    file = f"BFCL_v4_{_PREFIX}{name}.json"
    solutions = {each["id"]: each["ground_truth"] for each in _lines(f"possible_answer/{file}")}
    return tuple(_task(row, solutions[row["id"]]) for row in _lines(file))


def task_of(task_id: str) -> Task:
    """Find a task by its id, and shorten it if the id asks for that. Raises ValueError if there is none."""
    whole, _, requests = task_id.partition(":")
    name = whole.removeprefix(_PREFIX).rpartition("_")[0]
    task = next((each for each in load_tasks(name) if each.id == whole), None) if name in BFCL_SETS else None
    if task is None or not (requests or "1").isdecimal():
        raise ValueError(f"task={task_id!r} is no task: their ids are such as 'multi_turn_base_0'")
    return task.shortened(int(requests)) if requests else task


def rows_of(tasks: Iterable[Task], compact: bool = False, system: bool = True) -> list[dict[str, Any]]:
    """The rows of tasks: the columns `id`, `task` and `compact`, and the `prompt`, a list of messages.

    Args:
        tasks: The tasks to ask for.
        compact: Describe each function in one line and the rules in three, for small models. Otherwise the system
            message is the leaderboard's, with the functions' documents as JSON.
        system: Put the rules into a system message. Otherwise they begin the user's message, for chat templates
            without system messages.
    """
    return [
        {"id": task.id, "task": task.id, "compact": compact, "prompt": _prompt(task, compact, system)}
        for task in tasks
    ]


def write_rows(rows: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Write a JSONL file for `train_questions`, `eval_questions` and `sorl evaluate --questions`."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _prompt(task: Task, compact: bool, system: bool) -> list[dict[str, str]]:
    rules, request = _system_message(task.functions, compact), task.requests[0]
    if not system:
        return [{"role": "user", "content": f"{rules}\n\n{request}"}]
    return [{"role": "system", "content": rules}, {"role": "user", "content": request}]


def request_of(task: Task, number: int, compact: bool) -> str:
    """What the user says in request `number`, with the documents of the functions that it adds."""
    if number not in task.later:
        return task.requests[number]
    prompts = package("constants.default_prompts")
    text: str = prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING
    return text.format(functions=_documents(task.later[number], compact))


def _system_message(functions: Sequence[Mapping[str, Any]], compact: bool) -> str:
    if compact:
        return _COMPACT + _documents(functions, compact)
    prompts = package("constants.default_prompts")
    style = prompts.PROMPT_STYLE_TEMPLATES["classic"]
    form = prompts.OUTPUT_FORMAT_MAPPING["python"]
    text: str = prompts._PLAINTEXT_SYSTEM_PROMPT_TEMPLATE.format(
        persona=style["persona"],
        task=style["task"],
        tool_call_format=style["tool_call_no_tag"].format(output_format=form, param_types=""),
        multiturn_behavior=style["multiturn_behavior"],
        available_tools=style["available_tools"].format(format="json", functions=_documents(functions, compact)),
    )
    return text


def _documents(functions: Sequence[Mapping[str, Any]], compact: bool) -> str:
    if compact:
        return "\n".join(map(_in_a_line, functions))
    hint = " Note that the provided function is in Python 3 syntax."  # as the leaderboard adds it
    return json.dumps([{**each, "description": each["description"] + hint} for each in functions], indent=4)


def _in_a_line(function: Mapping[str, Any]) -> str:
    """For example `cd(folder): Change the current working directory to the specified folder`."""
    parameters, needed = function["parameters"]["properties"], function["parameters"].get("required", ())
    names = ", ".join(name if name in needed else f"{name}=None" for name in parameters)
    description = str(function["description"]).partition("Tool description: ")[2] or str(function["description"])
    return f"{function['name']}({names}): {description.partition('. ')[0].rstrip('.')}"


def _task(row: Mapping[str, Any], solution: Sequence[Sequence[str]]) -> Task:
    documents = [document for world in row["involved_classes"] for document in _functions(world)]
    later: dict[int, tuple[Mapping[str, Any], ...]] = {}
    for number, names in (row.get("missed_function") or {}).items():
        later[int(number)] = tuple(each for each in documents if each["name"] in names)
        documents = [each for each in documents if each["name"] not in names]
    return Task(
        id=row["id"],
        requests=tuple(messages[0]["content"] if messages else "" for messages in row["question"]),
        worlds=tuple(row["involved_classes"]),
        state=row["initial_config"],
        solution=tuple(map(tuple, solution)),
        functions=tuple(documents),
        later=later,
    )


@cache
def _functions(world: str) -> list[dict[str, Any]]:
    names = package("constants.executable_backend_config").MULTI_TURN_FUNC_DOC_FILE_MAPPING
    return _lines(f"multi_turn_func_doc/{names[world]}")


def _lines(path: str) -> list[dict[str, Any]]:
    folder = Path(package("constants").__path__[0]).parent / "data"
    return [json.loads(line) for line in (folder / path).read_text(encoding="utf-8").splitlines()]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="JSONL file to write")
    parser.add_argument("--sets", nargs="+", choices=BFCL_SETS, default=BFCL_SETS, help="default: all four")
    parser.add_argument("--limit", type=int, help="how many tasks of each set, from the first on; default: all 200")
    parser.add_argument("--compact", action="store_true", help="one line per function, for small models")
    parser.add_argument("--no_system", action="store_true", help="for chat templates without system messages")
    arguments = parser.parse_args(words)
    tasks = [task for name in arguments.sets for task in load_tasks(name)[: arguments.limit]]
    write_rows(rows_of(tasks, arguments.compact, not arguments.no_system), arguments.output)
    print(f"{len(tasks)} tasks: {arguments.output}")


if __name__ == "__main__":
    main()
