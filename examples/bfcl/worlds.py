"""The worlds of a task: they execute calls, and their states can be compared."""

from __future__ import annotations

import copy
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from examples.bfcl.calls import Call, WrongCall
from examples.bfcl.tasks import Task, package

Function = Callable[..., Any]

_BOUNDED = ("exponent", "precision", "decimal_places")
"""Arguments of `MathAPI` with which a short call could compute forever."""
_MOST, _MOST_NAME, _MOST_FILES = 1_000, 255, 20_000
"""The largest such argument; the most characters in a file's name; the most files in a file system. A file counts once
per path that leads to it, because `cp` shares what it copies, and 30 calls turn a few files into 2**30 paths."""
_ONE_AT_A_TIME = threading.Lock()
"""Worlds set the precision of libraries and share tables within the process. A call takes microseconds."""


class Worlds:
    """Instances of the package's classes, in the state that a task gives them.

    A call names a function alone, or as `World.name` if several worlds have a function of that name.
    """

    def __init__(self, task: Task) -> None:
        config = package("constants.executable_backend_config")
        self._worlds: dict[str, Any] = {}
        for name in task.worlds:
            module = config.CLASS_FILE_PATH_MAPPING[name].removeprefix("bfcl_eval.")
            world = self._worlds[name] = getattr(package(module), name)()
            if name not in config.STATELESS_CLASSES:
                with _ONE_AT_A_TIME:
                    world._load_scenario(copy.deepcopy(task.state.get(name, {})), long_context=task.long_context)
                    vars(world).update(copy.deepcopy(vars(world)))  # some of it belongs to the module
        self._functions: dict[str, dict[str, Function]] = {
            name: {key: method for key, method in inspect.getmembers(world, inspect.ismethod) if key[0] != "_"}
            for name, world in self._worlds.items()
        }
        self._is_full = False

    def call(self, call: Call) -> str:
        """Make a call, and return its result or its error as the leaderboard writes them.

        Raises WrongCall if no function or several have the name, or an argument is too large.
        """
        world, function = self._function(call.name)
        if self._is_full:
            raise WrongCall("the file system is full")
        with _ONE_AT_A_TIME:
            try:
                result = _written(function(*_own(function, call, world)))
            except WrongCall:
                raise
            except Exception as error:  # as the leaderboard has it
                return f"Error during execution: {error}"
        self._is_full = function.__name__ in ("cp", "mv") and _is_full(self._worlds[world])
        return result

    def equals(self, other: Worlds) -> bool:
        """Whether all worlds have the same state, that is, equal public attributes."""
        return not (self._is_full or other._is_full) and all(
            name in vars(world) and vars(world)[name] == value  # some attributes only exist after a call
            for key, world in self._worlds.items()
            for name, value in vars(other._worlds[key]).items()
            if name[0] != "_"
        )

    def _function(self, name: str) -> tuple[str, Function]:
        """Find a function, and the name of its world."""
        world, _, own = name.rpartition(".")
        asked: Mapping[str, Mapping[str, Function]] = self._functions
        if world:
            asked = {world: self._functions.get(world, {})}
        found = [(key, functions[own]) for key, functions in asked.items() if own in functions]
        if not found:
            raise WrongCall(f"there is no function {name}")
        if len(found) > 1:
            raise WrongCall(f"{name} is the name of several: write {' or '.join(f'{key}.{own}' for key, _ in found)}")
        return found[0]


def _own(function: Function, call: Call, world: str) -> Sequence[Any]:
    """The arguments of a call, by position. Defaults are copied, because worlds keep and change them.

    Raises TypeError for arguments that do not fit, and WrongCall for one that is too large.
    """
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*call.positional, **call.named)
    except TypeError:
        function(*call.positional, **call.named)  # raises the error that the leaderboard shows
        raise
    bound.apply_defaults()
    for name, value in bound.arguments.items():
        is_number = isinstance(value, int | float) and abs(value) <= _MOST
        if world == "MathAPI" and name in _BOUNDED and not is_number:
            raise WrongCall(f"{call.name}: {name} must be a number of at most {_MOST}")
        if world == "GorillaFileSystem" and name != "content" and isinstance(value, str) and len(value) > _MOST_NAME:
            raise WrongCall(f"{call.name}: {name} must have at most {_MOST_NAME} characters")
    return copy.deepcopy(list(bound.arguments.values()))


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
