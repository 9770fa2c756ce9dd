"""Methods, one file each, with pieces, config fields and source; and the tables built from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from inspect import isclass
from typing import Any

from sorl_trl.checks import did_you_mean, import_named, is_dotted
from sorl_trl.methods.dapo import *
from sorl_trl.methods.data import ClipRange, MicroBatch, Objective, ScoredRollout
from sorl_trl.methods.dr_mas import *
from sorl_trl.methods.engine import *
from sorl_trl.methods.gigpo import *
from sorl_trl.methods.gspo import *
from sorl_trl.methods.igpo import *
from sorl_trl.methods.loop import *
from sorl_trl.methods.method import *
from sorl_trl.methods.method import PIECE_FIELDS, Method, recipe_name
from sorl_trl.methods.minirl import *
from sorl_trl.methods.sorl import *

_FOUND = [value for value in list(globals().values()) if isinstance(value, Method)]
_PIECES = [found for method in _FOUND for found in method.pieces()]

METHODS: dict[str, Method] = {
    method.name: method for method in sorted(_FOUND, key=lambda each: each.name) if method.name
}
"""The named methods: every `Method` with a name in the `__all__` of a file imported above. Those with
`advantage_level` need `SOPPOTrainer`."""
SETTINGS: dict[str, dict[str, Any]] = {name: method.settings for name, method in METHODS.items()}
"""The config fields that the source of each named method sets: `SOGRPOConfig(**SETTINGS["loop"])`.

`sorl train --method NAME` uses them for fields that neither the recipe nor the command line sets."""
PIECES: dict[str, dict[str, type]] = {
    field: {recipe_name(type(piece)): type(piece) for place, piece in _PIECES if place == field}
    for field in PIECE_FIELDS
}
"""The pieces that a recipe can name, by field of `Method`."""
_NO_GAIN = "runs of version 0.3 showed no gain"
_GONE: Mapping[str, str] = {
    "double_sided": "its runs collapsed",
    "dppo": "'minirl' compares with the policy that sampled, too",
    **dict.fromkeys(("engine_turn_mask", "engine_veto"), "`vllm_importance_sampling_mode` has masks"),
    "ma_rlhf": "benchmarks/results/macro_actions.md shows no gain over turns",
    **dict.fromkeys(("llds", "not_void", "void"), _NO_GAIN),
    **dict.fromkeys(("ragen2", "starpo_s"), f"{_NO_GAIN}; 'dapo' drops groups with equal rewards"),
    **dict.fromkeys(("top_k", "top_p"), f"{_NO_GAIN}; 'zero_variance' drops groups with equal rewards"),
}
"""Methods and pieces that were removed since version 0.3, and why or what takes their place."""


def method_from(value: Any) -> Method:
    """Build a method from a name of `METHODS`, a mapping of pieces, such a mapping in JSON, or a method.

    A mapping looks like {"credit": "leave_one_out", "terms": [{"clip_penalty": {"coef": 1.0}}]}. A method or a piece
    of your own is named by its dotted path: "my_module.my_method", {"credit": "my_module.best_of_group"}.

    Raises:
        ValueError: A name is unknown, or a piece lacks a given argument.
    """
    if isinstance(value, Method):
        return value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _from_json(value)
    if is_dotted(value):
        method = import_named("method", value)
        if not isinstance(method, Method):
            raise ValueError(f"`method` is {value!r}, but that is a {type(method).__name__}, not a `Method`.")
        return method
    if isinstance(value, str):
        if value not in METHODS:
            raise ValueError(
                f"`method` is {value!r}, but must be one of {', '.join(METHODS)}, a mapping of pieces, or the dotted "
                f"path of a `Method`{_advice(value, METHODS)}"
            )
        return METHODS[value]
    if not isinstance(value, Mapping):
        raise ValueError(f"`method` is {value!r}, but must be a name or a mapping of pieces ({', '.join(PIECES)}).")
    return Method(**{field: _pieces(field, given) for field, given in value.items()})


def _advice(name: str, known: Iterable[str]) -> str:
    return f": it was removed; {_GONE[name]}" if name in _GONE else did_you_mean(name, known)


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"`method` is {text!r}, but must be a name or JSON: {error}.") from None


def _pieces(field: str, given: Any) -> Any:
    if field not in PIECES:
        raise ValueError(f"`method` has {field!r}, but must be made of {', '.join(PIECES)}.")
    if field not in ("keep", "terms"):
        return _piece(field, given)
    return tuple(_piece(field, each) for each in (given if isinstance(given, list | tuple) else [given]))


def _piece(field: str, given: Any) -> Any:
    name, arguments = next(iter(given.items())) if isinstance(given, Mapping) and len(given) == 1 else (given, {})
    known = PIECES[field]
    if not is_dotted(name) and (not isinstance(name, str) or name not in known):
        raise ValueError(
            f"`method.{field}` is {given!r}, but must be one of {', '.join(known)}, with its arguments, or the dotted "
            f"path of your own{_advice(str(name), known)}"
        )
    if not isinstance(arguments, Mapping | None):
        raise ValueError(f"`method.{field}.{name}` is {arguments!r}, but must be a mapping of its arguments.")
    if is_dotted(name):
        return _own_piece(field, name, arguments or {})
    allowed = [each.name for each in fields(known[name])]
    if unknown := sorted(set(arguments or {}) - set(allowed)):
        takes = ", ".join(allowed) or "no argument"
        raise ValueError(f"`method.{field}.{name}` has {unknown[0]!r}, but takes {takes}.")
    return known[name](**(arguments or {}))


def _own_piece(field: str, path: str, arguments: Mapping[str, Any]) -> Any:
    """A function unchanged; a class, such as a dataclass with settings, called with its arguments."""
    piece = import_named(f"method.{field}", path)
    if not isclass(piece):
        if arguments:
            raise ValueError(f"`method.{field}.{path}` has {sorted(arguments)}, but only a class takes arguments.")
        return piece
    try:
        return piece(**arguments)
    except TypeError as error:
        raise ValueError(f"`method.{field}.{path}` cannot be made with {dict(arguments)}: {error}.") from error


__all__ = [
    "METHODS",
    "PIECES",
    "SETTINGS",
    "ClipRange",
    "Method",
    "MicroBatch",
    "Objective",
    "ScoredRollout",
    "method_from",
    *sorted(known.__name__ for field_pieces in PIECES.values() for known in field_pieces.values()),
]
