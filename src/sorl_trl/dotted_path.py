"""Imports a user's own code by its dotted path, such as `my_rewards.brief`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import isclass
from typing import Any


def is_dotted(value: Any) -> bool:
    """Whether a value is text of several names with dots between them, which none of our own names has."""
    names = value.split(".") if isinstance(value, str) else []
    return len(names) > 1 and all(map(str.isidentifier, names))


def import_named(argument: str, path: str) -> Any:
    """Import what a dotted path names: a module, which may be in the current folder, and a name that it defines.

    Raises ValueError, which names the `argument`, if the module cannot be imported or lacks the name.
    """
    if not is_dotted(path):
        raise ValueError(f"`{argument}` is {path!r}, but must be a dotted path, such as 'my_module.my_name'.")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)  # where Python looks first for what a script in that folder imports
    module_name, _, name = path.rpartition(".")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ValueError(f"`{argument}` is {path!r}, but {module_name} cannot be imported: {error}.") from error
    if not hasattr(module, name):
        raise ValueError(f"`{argument}` is {path!r}, but {module_name} ({module.__file__}) has no {name!r}.")
    return getattr(module, name)


def factory_named(argument: str, path: str, method: str) -> Callable[[], Any]:
    """Import a class that has `method`, or a function that makes an object with it; both are called without arguments.

    Raises ValueError as `import_named` does, and for anything else.
    """
    factory = import_named(argument, path)
    if not callable(factory) or (isclass(factory) and not callable(getattr(factory, method, None))):
        raise ValueError(
            f"`{argument}` is {path!r}, but must name a class with a method `{method}`, or a function that makes one."
        )
    made: Callable[[], Any] = factory
    return made
