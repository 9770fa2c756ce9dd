"""The worlds of a task: what calls do in them, and whether two states of them are the same."""

from __future__ import annotations

import copy
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from sorl_trl.rollout.environments.bfcl.tasks import Task, package
from sorl_trl.rollout.environments.function_calls import Call, WrongCall
from sorl_trl.rollout.environments.responder import DOWN
from sorl_trl.rollout.environments.tools import Unavailable

Function = Callable[..., Any]

_BOUNDED = {"exponent": 1_000, "precision": 1_000, "decimal_places": 1_000}
"""Arguments of `MathAPI` by which a short call could compute for ever, and how large they may be."""
_MOST_FILES = 20_000
"""Of a file system, each counted as often as a path leads to it. `cp` shares what it copies: 30 calls make 2**30."""
_ONE_AT_A_TIME = threading.Lock()
"""`MathAPI` sets the precision of libraries for the whole process; a call takes microseconds."""


class Worlds:
    """Objects of the package's classes, with the state that a task gives them.

    Args:
        task: Whose worlds they are.
        tools: Functions of other origin, which calls may name too.

    A function is called by its name, or as `World.name`, where the world of `tools` is `tools`. A name that two worlds
    have must be written in the second way.
    """

    def __init__(self, task: Task, tools: Sequence[Function] = ()) -> None:
        config = package("constants.executable_backend_config")
        self._worlds: dict[str, Any] = {}
        for name in task.worlds:
            module = config.CLASS_FILE_PATH_MAPPING[name].removeprefix("bfcl_eval.")
            world = self._worlds[name] = getattr(package(module), name)()
            if name not in config.STATELESS_CLASSES:
                world._load_scenario(copy.deepcopy(task.state.get(name, {})), long_context=task.long_context)
        self._functions: dict[str, dict[str, Function]] = {
            name: {key: method for key, method in inspect.getmembers(world, inspect.ismethod) if key[0] != "_"}
            for name, world in self._worlds.items()
        }
        if tools:
            self._functions["tools"] = {tool.__name__: tool for tool in tools}
        self._is_full = False

    def call(self, call: Call) -> str:
        """What a call returns, as the leaderboard writes it; of one that fails, the error.

        Raises WrongCall for a function that there is not, or that two worlds have, and for a number that is too large,
        and ConnectionError or the like where a tool is down.
        """
        function = self._function(call.name)
        _check_bounds(function, call)
        if self._is_full:
            raise WrongCall("the file system is full")
        world = getattr(function, "__self__", None)
        try:
            with _ONE_AT_A_TIME if type(world).__name__ == "MathAPI" else nullcontext():
                result = function(*call.positional, **call.named)
        except DOWN:
            raise
        except Exception as error:  # as the leaderboard has it
            return f"Error during execution: {error}"
        if isinstance(result, Unavailable):
            raise ConnectionError(result)
        self._is_full = self._is_full or _is_full(world)
        return _written(result)

    def equals(self, other: Worlds) -> bool:
        """Whether all worlds have the same state: every attribute whose name is public."""
        return not (self._is_full or other._is_full) and all(
            getattr(world, name) == value
            for key, world in self._worlds.items()
            for name, value in vars(other._worlds[key]).items()
            if name[0] != "_"
        )

    def _function(self, name: str) -> Function:
        world, _, own = name.rpartition(".")
        named: Mapping[str, Mapping[str, Function]] = self._functions
        if world:
            named = {world: self._functions.get(world, {})}
        found = {key: functions[own] for key, functions in named.items() if own in functions}
        if not found:
            raise WrongCall(f"there is no function {name}")
        if len(found) > 1:
            raise WrongCall(f"{name} is the name of several: write {' or '.join(f'{key}.{own}' for key in found)}")
        return next(iter(found.values()))


def _check_bounds(function: Function, call: Call) -> None:
    with suppress(TypeError):  # arguments that do not fit: the call says so
        for name, value in inspect.signature(function).bind(*call.positional, **call.named).arguments.items():
            most = _BOUNDED.get(name)
            if most is not None and isinstance(value, int | float) and abs(value) > most:
                raise WrongCall(f"{call.name}: {name} must be at most {most}")


def _is_full(world: Any) -> bool:
    root: Any = getattr(world, "root", None)
    left, count = [root] if hasattr(root, "contents") else [], 0
    while left and count < _MOST_FILES:
        children = left.pop().contents.values()
        count += len(children)
        left += [child for child in children if hasattr(child, "contents")]
    return count >= _MOST_FILES


def _written(result: Any) -> str:
    if isinstance(result, dict):
        with suppress(TypeError, ValueError):
            return json.dumps(result)
    return str(result)
