"""What a policy writes into a tag, as the arguments of a method."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

_SIMPLE = (str, int, float, bool)
_TRUTHS = {"true": True, "false": False}


class WrongArguments(Exception):
    """They do not fit the method: the message is for the policy."""


def read_arguments(method: Callable[..., Any], content: str) -> dict[str, Any]:
    """The arguments of `method`: a JSON object of them or, where it has one argument, that as plain text.

    What is to be a number or a truth value may be written as text; what is annotated otherwise is taken as it is.

    Raises WrongArguments for what does not fit.
    """
    parameters = inspect.signature(method).parameters
    named = _json_object(content)
    is_one = len(parameters) == 1 and not any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if is_one and (named is None or not set(named) <= set(parameters)):
        named = dict.fromkeys(parameters, content)
    if named is None:
        raise WrongArguments(f"{method.__name__} takes a JSON object with {_expected(parameters)}")
    try:
        inspect.signature(method).bind(**named)
    except TypeError as error:
        raise WrongArguments(f"{method.__name__}: {error}; it takes {_expected(parameters)}") from error
    hints = get_type_hints(method)
    return {name: _converted(method, name, value, hints.get(name)) for name, value in named.items()}


def _json_object(content: str) -> dict[str, Any] | None:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _expected(parameters: Mapping[str, inspect.Parameter]) -> str:
    return ", ".join(f'"{name}"' for name in parameters) or "no arguments: {}"


def _converted(method: Callable[..., Any], name: str, value: Any, hint: Any) -> Any:
    kinds = [hint] if hint in _SIMPLE else _kinds(hint)
    if not kinds or type(value) in kinds or (value is None and type(None) in kinds):
        return value
    for kind in kinds:
        converted = _as(kind, value)
        if converted is not None:
            return converted
    names = " or ".join(kind.__name__ for kind in kinds)
    raise WrongArguments(f"{method.__name__}: {name} must be {names}, not {json.dumps(value)[:80]}")


def _kinds(hint: Any) -> list[Any]:
    """The simple types of a union, with None; empty where there is another type among them."""
    kinds = list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else []
    return kinds if all(kind in (*_SIMPLE, type(None)) for kind in kinds) else []


def _as(kind: Any, value: Any) -> Any:
    """`value` as that type, where it is one or spells one; else None."""
    if kind is bool:
        return _TRUTHS.get(value.strip().lower()) if isinstance(value, str) else None
    if kind not in (int, float) or isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value) if kind is float else int(value)
    except (ValueError, OverflowError):
        return None
    return number if kind is float or not isinstance(value, float) or number == value else None
