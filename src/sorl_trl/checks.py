"""Declares and checks the allowed values of arguments, and imports objects by dotted path.

A field declares its allowed values in its annotation: `gamma: Annotated[float, Number(least=0, most=1)]`. It does not
use `field(metadata=…)`, because `HfArgumentParser` passes that on to argparse: an additional key would break every
parser of such a dataclass, including those of TRL's own scripts. `__post_init__`, of `Checked` or the class's own,
calls `check_fields(self)`.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from inspect import isclass, signature
from math import inf
from numbers import Real
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


class Allowed:
    """The allowed values of an argument. `str()` describes them in words that continue "but must be"."""

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
    """Numbers from `least` to `most`, above `above` and below `below`. NaN and bools are never allowed."""

    least: float = -inf
    above: float = -inf
    most: float = inf
    below: float = inf
    whole: bool = False
    finite: bool = True

    def allows(self, value: Any) -> bool:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or value == inf:
            return is_number and not self.finite
        is_inside = self.least <= value <= self.most and self.above < value < self.below
        return is_inside and (not self.whole or value == int(value))

    def __str__(self) -> str:
        if self.least != -inf and self.most != inf:
            return f"in [{self.least:g}, {self.most:g}]"
        limits = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        bounds = " and ".join(f"{word} {bound:g}" for word, bound in limits.items() if abs(bound) != inf)
        if self.whole:
            return f"a whole number, {bounds}"
        return f"finite and {bounds}" if self.finite and self.most == self.below == inf else bounds


@dataclass(frozen=True)
class OneOf(Allowed):
    """Certain names or truth values, and no look-alikes: the text 'false' would be true, and so would 1."""

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
"""Infinity means no limit."""
SWITCH = OneOf((True, False))


_TO_FILES = "write public sets to files with examples/public_questions.py, and give them to `--questions`"
_ENGINE = "every index is BM25's; for another engine, give the URL of its server to `--search_url`"
GONE: Mapping[str, str] = {
    **dict.fromkeys(("benchmarks", "data_source_folder"), _TO_FILES),
    **dict.fromkeys(("engine", "search_engine"), _ENGINE),
    "async_old_policy": "ratios compare with the policy that sampled (docs/how_to/async.md)",
    "choice": "`answer` is the choice of questions with options",
    **dict.fromkeys(("format", "turn_format", "search_hit"), "examples/own_reward.py has rewards of turns"),
    "critic_trunk_gradient": "the value loss of `critic='head'` trains only the head",
    "kl_in_reward": "`beta` adds the KL to the loss",
    "log_agent_gradients": "docs/reference/metrics.md lists what is logged of each agent",
    "macro_action_tokens": "macro actions showed no gain over turns (benchmarks/results/macro_actions.md)",
    "search_cache": "your own engine, `search_backend`, may keep its answers",
    "rollout_func": "pass it to the trainer, in Python",
    "sub_exact_match": "long answers exploited it; `f1` and `exact_match` reward answers",
    "value_pool": "the critic is read before the first token of a turn, or of each with `advantage_level='token'`",
}
"""Options and rewards that were removed, and what takes their place."""


def check_fields(instance: Any, inherited: Mapping[str, Allowed] | None = None) -> None:
    """Raise ValueError for the first field of a dataclass with a value that its annotation does not allow.

    A field of numbers or truth values never takes a string. None is allowed if the field's type includes it.
    `inherited` has the allowed values of a base class's fields.
    """
    hints = get_type_hints(type(instance), include_extras=True)
    for field in fields(instance):
        hint, allowed = hints[field.name], (inherited or {}).get(field.name)
        if get_origin(hint) is Annotated:
            allowed = next((each for each in hint.__metadata__ if isinstance(each, Allowed)), allowed)
            hint = hint.__origin__
        kinds = {*get_args(hint)} if get_origin(hint) in (Union, types.UnionType) else {hint}
        value, or_none = getattr(instance, field.name), type(None) in kinds
        if isinstance(value, str) and kinds - {type(None)} <= {bool, int, float}:  # '2' reads like 2 in a message
            wanted = allowed or (SWITCH if bool in kinds else "a number")
            raise ValueError(f"`{field.name}` is {value!r}, which is a string, but must be {wanted}.")
        if allowed is not None:
            allowed.check(field.name, value, or_none)


class Checked:
    """Base of dataclasses that only call `check_fields` on creation."""

    def __post_init__(self) -> None:
        check_fields(self)


def check_names(cls: type, given: Iterable[str], others: Mapping[str, Iterable[str]]) -> None:
    """Raise TypeError for a keyword argument that a class does not take, and say whose it is or what was meant.

    `others` are arguments of something else, by its name.
    """
    known = signature(cls.__init__).parameters  # type: ignore[misc]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())  # a subclass with its own __init__
    for name in () if takes_any else (each for each in given if each not in known):
        owner = next((owner for owner, names in others.items() if name in names), None)
        advice = f": pass it to {owner}" if owner else did_you_mean(name, known)
        raise TypeError(f"`{name}` is not a field of {cls.__name__}{advice}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What to append to a message about the unknown `name`: what became of it, or a similar `known` one, if any."""
    if name.lstrip("-") in GONE:
        return f": it was removed; {GONE[name.lstrip('-')]}"
    close = get_close_matches(name, [*known], n=1, cutoff=0.75)
    return f": did you mean {close[0]}?" if close else ""


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    OneOf(tuple(choices)).check(name, value)


def is_dotted(value: Any) -> bool:
    """Whether a value is text of several names joined by dots, which no built-in name has.

    The last dot may be a colon, as in `my_module:my_name`.
    """
    names = _with_dots(value).split(".") if isinstance(value, str) else []
    return len(names) > 1 and all(map(str.isidentifier, names))


def _with_dots(path: str) -> str:
    module, _, name = path.rpartition(":")
    return f"{module}.{name}" if module and "." not in name else path


def import_named(argument: str, path: str) -> Any:
    """Import an object by dotted path: a module, possibly in the current folder, and a name that it defines.

    Raises ValueError, which names the `argument`, if the module cannot be imported or lacks the name.
    """
    if not is_dotted(path):
        raise ValueError(f"`{argument}` is {path!r}, but must be a dotted path, such as 'my_module.my_name'.")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)  # where Python looks first for what a script in that folder imports
    module_name, _, name = _with_dots(path).rpartition(".")
    try:
        module = import_module(module_name)
    except ImportError as error:
        if module_name.endswith(".py"):
            remedy = f"{module_name.removesuffix('.py')}:{name}"
            raise ValueError(f"`{argument}` is {path!r}: write {remedy}, without .py.") from error
        raise ValueError(f"`{argument}` is {path!r}, but {module_name} cannot be imported: {error}.") from error
    if not hasattr(module, name):
        raise ValueError(f"`{argument}` is {path!r}, but {module_name} ({module.__file__}) has no {name!r}.")
    return getattr(module, name)


def factory_named(argument: str, path: str, method: str) -> Callable[[], Any]:
    """Import a class with `method`, or a function that makes an object with it; both are called without arguments.

    Raises the ValueErrors of `import_named`, and ValueError for any other object.
    """
    factory = import_named(argument, path)
    if not callable(factory) or (isclass(factory) and not callable(getattr(factory, method, None))):
        raise ValueError(
            f"`{argument}` is {path!r}, but must name a class with a method `{method}`, or a function that makes one."
        )
    made: Callable[[], Any] = factory
    return made
