"""The list of parameters in a config's docstring, written from its fields: TRL's form, each text in one place."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from inspect import cleandoc, get_annotations
from textwrap import indent, wrap
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from trl import GRPOConfig

Config = TypeVar("Config", bound=type)
LINE_LENGTH = 110
"""Of a text, before `help()` indents it."""


def documented(config_class: Config) -> Config:
    """A decorator of configs: the fields that they add to TRL's, or change there, are listed in the docstring.

    Name, type and default are the field's, the text is its `help`, which `train.py --help` shows too.
    """
    if config_class.__doc__ is not None:  # python -OO has none
        parameters = indent("\n".join(_entry(config_class, each) for each in own_fields(config_class)), "    ")
        config_class.__doc__ = f"{cleandoc(config_class.__doc__)}\n\nParameters:\n{parameters}\n"
    return config_class


def own_fields(config_class: type) -> list[Field[Any]]:
    """The fields that our classes add or change, those of their bases first."""
    ours = [each for each in reversed(config_class.__mro__) if not issubclass(GRPOConfig, each)]
    known = {each.name: each for each in fields(config_class)}
    names = dict.fromkeys(name for each in ours for name in get_annotations(each))
    return [known[name] for name in names if name in known]


def _entry(config_class: type, parameter: Field[Any]) -> str:
    text = "\n".join(wrap(parameter.metadata["help"], LINE_LENGTH, break_long_words=False, break_on_hyphens=False))
    return f"{parameter.name} ({_described(config_class, parameter)}):\n{indent(text, '    ')}"


def _described(config_class: type, parameter: Field[Any]) -> str:
    """Type and default: `float`, *optional*, defaults to `0.2`."""
    hint = get_type_hints(config_class)[parameter.name]
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    names = [each.__name__ if isinstance(each, type) and not get_args(each) else str(each) for each in options]
    shown = " or ".join(f"`{name}`" for name, each in zip(names, options, strict=True) if each is not NoneType)
    made = parameter.default_factory
    default = parameter.default if made is MISSING else made()
    optional = ", *optional*" if NoneType in options else ""
    return f"{shown}{optional}" if default is None else f"{shown}{optional}, defaults to `{default!r}`"
