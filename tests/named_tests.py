"""Tests that a page or a table names: whether they exist, and whether they are about what they are named for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any


def function_of(name: str) -> Any:
    """Of `integration/test_options.py::test_loss_options` or `…::TestClass::test_method`; AttributeError if none."""
    file, *path = name.split("::")
    found: Any = importlib.import_module("tests." + file.removesuffix(".py").replace("/", "."))
    for part in path:
        found = getattr(found, part)
    return found


def what_it_tries(function: Any) -> str:
    """Its source, what it is parametrized with, and the tables of its module that it reads."""
    return " ".join([*_parameters(function), *_tables(function), inspect.getsource(function)])


def _parameters(function: Any) -> Iterator[str]:
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            # A dictionary is parametrized by its keys; what makes an option count is in its values.
            yield from map(str, mark.args[1])


def _tables(function: Any) -> Iterator[str]:
    read = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    for value in read.values():
        if isinstance(value, dict):
            yield str(value)
