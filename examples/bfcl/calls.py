"""Parses the calls that a policy writes in a message, as Python or as JSON, without evaluating anything."""

from __future__ import annotations

import ast
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_MOST_CHARACTERS, _MOST_CALLS, _DEEPEST, _MOST_DIGITS = 16_384, 100, 50, 15
_PYTHON = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(|[A-Za-z_][\w.]*\(")
_FENCE = re.compile(r"```(?:\w*\n)?(.*?)(?:```)?", re.DOTALL)
_JSON = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


_PARSING = threading.Lock()
"""Python counts its depth in a tree across all threads (gh-106905), and raises an error if the sum is wrong."""


class WrongCall(Exception):
    """A call that cannot be made. The message is for the policy."""


@dataclass(frozen=True)
class Call:
    """A function's name, possibly with that of its world (`MathAPI.add`), and its arguments."""

    name: str
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)


def read_calls(message: str) -> list[Call]:
    """The calls of a message, in order; empty for plain text.

    A message calls functions as Python, `[cd(folder='a'), ls()]`, where either bracket may be missing, or as JSON,
    `<tool_call>{"name": "cd", "arguments": {"folder": "a"}}</tool_call>`, any number of times. Text before `</think>`
    is ignored. Arguments are literals.

    Raises WrongCall if a message begins like calls but cannot be parsed as such, has more than 16,384 characters or
    100 calls, nests brackets more than 50 deep, or has a whole number of more than 15 digits.
    """
    text = message.rpartition("</think>")[2].strip()
    if fenced := _FENCE.fullmatch(text):
        text = fenced[1].strip()
    is_python = bool(_PYTHON.match(text))
    if not is_python and "<tool_call>" not in text:
        return []
    if len(text) > _MOST_CHARACTERS:
        raise WrongCall(f"the message has {len(text)} characters, and {_MOST_CHARACTERS} are read")
    if _depth(text) > _DEEPEST:
        raise WrongCall(f"brackets are nested more than {_DEEPEST} deep")
    calls = [*(_python_calls(text) if is_python else _json_calls(text))]
    if len(calls) > _MOST_CALLS:
        raise WrongCall(f"the message has {len(calls)} calls, and {_MOST_CALLS} are made")
    for call in calls:
        _check_numbers([*call.positional, *call.named.values()])
    return calls


def _python_calls(text: str) -> Iterator[Call]:
    text = "[" * (text[0] != "[") + text + "]" * (text[-1] != "]")
    try:
        with _PARSING:
            body = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise WrongCall(f"the calls cannot be read: {_reason(error)}") from error
    for node in getattr(body, "elts", [body]):
        if not isinstance(node, ast.Call):
            raise WrongCall("a list of calls must hold nothing else")
        try:
            positional = tuple(map(ast.literal_eval, node.args))
            named = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords if each.arg is not None}
        except (ValueError, TypeError, ArithmeticError, SyntaxError, RecursionError, MemoryError) as error:
            raise WrongCall(f"{_name(node.func)}: arguments must be literals, such as 'a', 3 or [1, 2]") from error
        if len(named) < len(node.keywords):
            raise WrongCall(f"{_name(node.func)}: each argument must have a name of its own")
        yield Call(_name(node.func), positional, named)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise WrongCall("a function must be called by its name")


def _json_calls(text: str) -> Iterator[Call]:
    if text.count("<tool_call>") != text.count("</tool_call>"):
        raise WrongCall("each <tool_call> needs its </tool_call>")
    for written in _JSON.findall(text):
        try:
            call = json.loads(written)
        except (ValueError, RecursionError) as error:
            raise WrongCall(f"a call cannot be read as JSON: {_reason(error)}") from error
        is_call = isinstance(call, dict) and isinstance(call.get("name"), str)
        arguments = (call.get("arguments") or {}) if is_call else None
        if not isinstance(arguments, dict):
            raise WrongCall('a call is an object such as {"name": "ls", "arguments": {"a": true}}')
        yield Call(call["name"], (), arguments)


def _depth(text: str) -> int:
    """How deep brackets are nested, including those in quoted text."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _check_numbers(values: list[Any]) -> None:
    """Refuse numbers with which a world could compute forever."""
    while values:
        value = values.pop()
        if isinstance(value, int) and abs(value) >= 10**_MOST_DIGITS:
            raise WrongCall(f"a number has more than {_MOST_DIGITS} digits")
        if isinstance(value, dict):
            values += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            values += value


def _reason(error: BaseException) -> str:
    return " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())[:200] or type(error).__name__
