"""Lets each argument say what it allows, and checks it with one function.

A field says what it allows in its annotation: `gamma: Annotated[float, Number(least=0, most=1)]`. It does not say so
in `field(metadata=…)`, because `HfArgumentParser` passes that on to argparse: a key of ours would break every parser
of such a dataclass, including those of TRL's own scripts. `__post_init__` calls `check_fields(self)`.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import inf
from numbers import Real
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


class Allowed:
    """What an argument may be. `str()` says it in words that continue "but must be"."""

    def allows(self, value: Any) -> bool:
        raise NotImplementedError

    def check(self, name: str, value: Any, or_none: bool = False) -> None:
        """Raise a ValueError that names the argument unless `value` is allowed, or is None and `or_none` is True."""
        if self.allows(value) or (or_none and value is None):
            return
        otherwise = ", or None (null in YAML)" if or_none else ""
        raise ValueError(f"`{name}` is {value!r}, but must be {self}{otherwise}.")


@dataclass(frozen=True)
class Number(Allowed):
    """Numbers from `least` to `most`, which lie above `above` and below `below`. NaN and bools are never allowed."""

    least: float = -inf
    above: float = -inf
    most: float = inf
    below: float = inf
    whole: bool = False
    finite: bool = True

    def allows(self, value: Any) -> bool:
        is_number = isinstance(value, Real) and not isinstance(value, bool) and value == value
        if not is_number or (abs(value) == inf and (self.finite or self.whole)):
            return False
        inside = self.above < value or self.above == -inf, value < self.below or self.below == inf
        return self.least <= value <= self.most and all(inside) and (not self.whole or value == int(value))

    def __str__(self) -> str:
        limits = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        bounds = " and ".join(f"{word} {bound:g}" for word, bound in limits.items() if abs(bound) != inf)
        if self.least != -inf and self.most != inf:
            bounds = f"in [{self.least:g}, {self.most:g}]"
        if self.whole:
            return f"a whole number, {bounds}"
        return f"finite and {bounds}" if self.finite and self.most == self.below == inf else bounds


@dataclass(frozen=True)
class OneOf(Allowed):
    """Certain names or truth values, and nothing that merely passes for one: the text 'false' is true, and so is 1."""

    choices: tuple[str | bool, ...]

    def allows(self, value: Any) -> bool:
        return isinstance(value, str | bool) and value in self.choices

    def __str__(self) -> str:
        return f"one of {', '.join(map(repr, self.choices))}"


COUNT = Number(least=0, whole=True)
POSITIVE_COUNT = Number(least=1, whole=True)
NOT_NEGATIVE = Number(least=0)
SHARE = Number(least=0, most=1)
SECONDS = Number(least=0, finite=False)
"""Infinity means for ever."""
SWITCH = OneOf((True, False))


def check_fields(instance: Any, inherited: Mapping[str, Allowed] | None = None) -> None:
    """Raise ValueError for the first field of a dataclass whose value its annotation does not allow.

    None is allowed if the field's type includes it. `inherited` gives what unannotated fields of a base class allow.
    """
    hints = get_type_hints(type(instance), include_extras=True)
    for field in fields(instance):
        hint, allowed = hints[field.name], (inherited or {}).get(field.name)
        if get_origin(hint) is Annotated:
            allowed = next((each for each in hint.__metadata__ if isinstance(each, Allowed)), allowed)
            hint = hint.__origin__
        if allowed is not None:
            or_none = get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)
            allowed.check(field.name, getattr(instance, field.name), or_none)


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    OneOf(tuple(choices)).check(name, value)
