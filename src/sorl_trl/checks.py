"""What an argument may be: said once, beside the argument, and checked by one function.

A field says what it allows in its annotation: `gamma: Annotated[float, Number(least=0, most=1)]`. It stands there and
not in `field(metadata=…)`, which `HfArgumentParser` hands to argparse as it is: a key of ours would break every parser
that reads such a dataclass, TRL's own scripts among them.

What is wrong with a set of arguments is a sequence of `Problem`. Whoever needs sound arguments raises the first
(`raise_first`); whoever examines them, as the doctor does, lists all.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import inf
from numbers import Real
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin, get_type_hints

UNSET: Any = object()
"""In the place of a value that nobody knows; None is a value."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with some arguments."""

    option: str
    """The argument to change."""
    what: str
    """A message that names it, its value, and what is allowed."""
    proposal: Any = UNSET
    """What to write in its place, where that can be said."""


@dataclass(frozen=True)
class Number:
    """Numbers between two bounds, of which `above` and `below` themselves are not allowed. NaN and bools never are."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    whole: bool = False
    finite: bool = True

    def allows(self, value: Any) -> bool:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        return is_number and value == value and self._has_kind(value) and self._is_within(value)

    def _has_kind(self, value: Any) -> bool:
        if abs(value) == inf:
            return not (self.finite or self.whole)
        return not self.whole or bool(value == int(value))

    def _is_within(self, value: Any) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            bounds = f"in [{self.least:g}, {self.most:g}]"
        else:
            words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
            bounds = " and ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)
        if self.whole:
            return f"a whole number, {bounds}"
        is_bounded = self.most is not None or self.below is not None
        return bounds if is_bounded or not self.finite else f"finite and {bounds}"


@dataclass(frozen=True)
class OneOf:
    """Some names, and nothing else."""

    choices: tuple[str, ...]

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.choices

    def __str__(self) -> str:
        return f"one of {', '.join(map(repr, self.choices))}"


@dataclass(frozen=True)
class Switch:
    """True or False, and nothing that merely counts as one: the text 'false' is true."""

    def allows(self, value: Any) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "True or False"


Allowed: TypeAlias = Number | OneOf | Switch
"""What an argument may be; `str()` says it in words that go on after "but must be"."""

COUNT = Number(least=0, whole=True)
POSITIVE_COUNT = Number(least=1, whole=True)
NOT_NEGATIVE = Number(least=0)
SHARE = Number(least=0, most=1)
SECONDS = Number(least=0, finite=False)
"""Infinity is for ever."""
SWITCH = Switch()


def field_problems(config: Any, of: str = "", inherited: Mapping[str, Allowed] | None = None) -> Iterator[Problem]:
    """What is wrong with the fields of a dataclass, each by itself, in their order.

    Args:
        config: an instance.
        of: follows a field's name in the messages: which of several such instances it is.
        inherited: what fields of a base class allow, where it does not say it. A field whose type has None allows it.
    """
    for name, (said, or_none) in _annotations(type(config)).items():
        allowed = said or (inherited or {}).get(name)
        if allowed is not None and (problem := _problem(name, getattr(config, name), allowed, or_none, of)):
            yield problem


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of the names."""
    raise_first([_problem(name, value, OneOf(tuple(choices)))])


def check_number(name: str, value: Any, allowed: Number) -> None:
    """Raise ValueError unless `value` is such a number."""
    raise_first([_problem(name, value, allowed)])


def raise_first(problems: Iterable[Problem | None]) -> None:
    """Raise ValueError with the first problem there is."""
    for problem in filter(None, problems):
        raise ValueError(problem.what)


class Checked:
    """A dataclass that is refused where something is wrong with it: `__post_init__` raises the first of `problems`."""

    def problems(self) -> Iterator[Problem]:
        """Everything that is wrong with it. Subclasses add what their fields must be together."""
        yield from field_problems(self)

    def __post_init__(self) -> None:
        raise_first(self.problems())


def _problem(name: str, value: Any, allowed: Allowed, or_none: bool = False, of: str = "") -> Problem | None:
    if allowed.allows(value) or (value is None and or_none):
        return None
    otherwise = ", or None" if or_none else ""
    if or_none and isinstance(value, str) and value in ("None", "none", "null"):
        otherwise = ", or left out (null in YAML)"
    return Problem(name, f"`{name}`{of} is {value!r}, but must be {allowed}{otherwise}.")


def _annotations(config_class: type) -> dict[str, tuple[Allowed | None, bool]]:
    """Field -> what its annotation allows, if it says it, and whether it has None."""
    hints = get_type_hints(config_class, include_extras=True)
    return {each.name: _read(hints[each.name]) for each in fields(config_class)}


def _read(hint: Any) -> tuple[Allowed | None, bool]:
    said = None
    if get_origin(hint) is Annotated:
        said = next((each for each in hint.__metadata__ if isinstance(each, Allowed)), None)
        hint = hint.__origin__
    is_union = get_origin(hint) in (Union, types.UnionType)
    return said, is_union and type(None) in get_args(hint)
