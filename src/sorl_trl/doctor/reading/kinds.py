"""Values of another kind than their argument's: YAML has kinds of its own, and nothing checks them before training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from sorl_trl.doctor.findings import Finding
from sorl_trl.doctor.reading.recipe_file import RecipeFile

KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    dict: ((dict,), "a mapping"),
    list: ((list,), "a list"),
    NoneType: ((NoneType,), "null"),
}
"""Annotation -> the kinds of value that it means, and what to call them. Others are taken as they come."""
AS_GOOD = {("scale_rewards", bool), ("lora_target_modules", str)}
"""Kinds that the annotation does not tell: TRL takes true and false for 'group' and 'none', PEFT 'all-linear'."""


def replace_mistyped(recipe: RecipeFile, raw: Any, groups: Iterable[type]) -> Iterator[Finding]:
    """Every such value of the recipe; each is replaced by its default, so that the rest can be checked."""
    for group in groups:
        hints = get_type_hints(group)
        for argument in fields(group):
            name = argument.name
            if name not in recipe.lines or name in recipe.overridden:
                continue
            if expected := _mismatch(name, getattr(raw, name), hints[name]):
                yield _mistyped(recipe, name, getattr(raw, name), expected)
                setattr(raw, name, default(argument))


def _mistyped(recipe: RecipeFile, name: str, value: object, expected: str) -> Finding:
    hint = ": in quotes" if "text" in expected and isinstance(value, bool) else ""
    a_list = "a list" in expected and not isinstance(value, dict | bool | None)
    line = recipe.line(name, [value]) if a_list else recipe.line(name)
    return Finding("error", f"`{name}` is {value!r}, but must be {expected}{hint}", line)


def _mismatch(name: str, value: object, hint: Any) -> str:
    """What the value must be, or "" if it is."""
    if (name, type(value)) in AS_GOOD:
        return ""
    options = [_plain(each) for each in (get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint])]
    if any(each not in KINDS or _is_one(value, KINDS[each][0]) for each in options):
        return ""
    return " or ".join(dict.fromkeys(KINDS[each][1] for each in options))


def _plain(hint: Any) -> Any:
    """`list` for `list[str]`; an enumeration is text in a recipe."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return str
    return get_origin(hint) or hint


def _is_one(value: object, kinds: tuple[type, ...]) -> bool:
    """`isinstance`, but for true and false, which are no numbers in a recipe."""
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def default(argument: Field[Any]) -> Any:
    """What the argument is where nobody gives it, None where somebody must."""
    if argument.default_factory is not MISSING:
        return argument.default_factory()
    return None if argument.default is MISSING else argument.default
