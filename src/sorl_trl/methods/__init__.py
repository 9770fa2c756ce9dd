"""Methods, one file each, with pieces and source; and how a trainer finds its method."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from inspect import isclass
from typing import Any

from sorl_trl.checks import did_you_mean, import_named, is_dotted
from sorl_trl.methods.credit import *
from sorl_trl.methods.dapo import *
from sorl_trl.methods.data import Clip, ClipRange, MicroBatch, Objective, Ratio, ScoredRollout
from sorl_trl.methods.dr_mas import *
from sorl_trl.methods.engine import *
from sorl_trl.methods.gigpo import *
from sorl_trl.methods.gspo import *
from sorl_trl.methods.igpo import *
from sorl_trl.methods.loop import *
from sorl_trl.methods.means import *
from sorl_trl.methods.method import *
from sorl_trl.methods.method import DECIDES, NUMBERS, SINGLE, Method, recipe_name
from sorl_trl.methods.minirl import *
from sorl_trl.methods.sorl import *
from sorl_trl.methods.surrogates import *

_FOUND = [value for value in list(globals().values()) if isinstance(value, Method)]
METHODS: dict[str, Method] = {method.name: method for method in sorted(_FOUND, key=lambda each: each.name)}
"""The named methods: every `Method` in the `__all__` of a file imported above. `GAE` needs `SOPPOTrainer`."""
_CLASSES: Mapping[str, tuple[type, ...]] = {
    "surrogate": (PPOMin, MiniRL, CISPO, SAPO, VESPO),
    "mean": (TurnMean, TrajectoryMean, ConstantMean, TokenMean, MicroBatchMean, TokenSum),
    "credit": (GroupMean, LeaveOneOut, GiGPO, Separate, AgentWise, GAE),
    "keep": (ZeroVariance,),
    "weight": (TurnRatio, Unweighted),
    "terms": (ClipPenalty,),
}
PIECES: dict[str, dict[str, type]] = {
    field: {recipe_name(each): each for each in classes} for field, classes in _CLASSES.items()
}
"""The pieces that a recipe can name, by field of `Method`. Beside them it sets `ratio`, `clip` and numbers."""
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


def method_from(value: Any, config: Any) -> Method:
    """A trainer's method, from what `read_method` reads and the trainer's config.

    A mapping of pieces replaces those that the config describes; with a `name`, those of a named method. A named
    method, or a `Method`, is the whole algorithm, and the config's fields must not ask for another.

    Raises:
        ValueError: As `read_method`; or a config field asks for another piece than the method decides.
    """
    given = read_method(value)
    if isinstance(given, Method):
        given.check_decided(config, DECIDES)
        return given
    pieces = {field: piece for field, piece in given.items() if field != "name"}
    if "name" not in given:
        method = replace(Method.from_config(config), **pieces)
        method.check_decided(config, pieces)
        named = next((name for name, each in METHODS.items() if each == method), "")
        return replace(method, name=named)
    method = replace(_named(given["name"]), **pieces)
    method.check_decided(config, DECIDES)
    return method


def read_method(value: Any) -> Method | dict[str, Any]:
    """Read a name of `METHODS`, a mapping of pieces, such a mapping in JSON, or a method: a method, or its pieces.

    A mapping looks like {"credit": "leave_one_out", "clip": {"low": 0.2}, "terms": [{"clip_penalty": {"coef": 1.0}}]},
    and may begin with the `name` of a method. A method or a piece of your own is named by its dotted path:
    "my_module.my_method", {"credit": "my_module.best_of_group"}.

    Raises:
        ValueError: A name is unknown, or a piece lacks a given argument.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _from_json(value)
    if isinstance(value, Method):
        return value
    if isinstance(value, str):
        return _named(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"`method` is {value!r}, but must be a name or a mapping of pieces ({', '.join(DECIDES)}).")
    pieces = {field: _pieces(field, given) for field, given in value.items() if field != "name"}
    replace(_named(value.get("name", "so_grpo")), **pieces)  # raises ValueError for a number out of range
    return pieces | {field: name for field, name in value.items() if field == "name"}


def _named(name: Any) -> Method:
    if is_dotted(name):
        method = import_named("method", name)
        if not isinstance(method, Method):
            raise ValueError(f"`method` is {name!r}, but that is a {type(method).__name__}, not a `Method`.")
        return method
    if name not in METHODS:
        raise ValueError(
            f"`method` is {name!r}, but must be one of {', '.join(METHODS)}, a mapping of pieces, or the dotted path "
            f"of a `Method`{_advice(str(name), METHODS)}"
        )
    return METHODS[name]


def _advice(name: str, known: Iterable[str]) -> str:
    return f": it was removed; {_GONE[name]}" if name in _GONE else did_you_mean(name, known)


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"`method` is {text!r}, but must be a name or JSON: {error}.") from None


def _pieces(field: str, given: Any) -> Any:
    if field not in DECIDES:
        raise ValueError(f"`method` has {field!r}, but must be made of {', '.join(DECIDES)}, and perhaps a `name`.")
    if field in NUMBERS:
        return given
    if field in SINGLE:
        return _made(f"method.{field}", SINGLE[field], given) if isinstance(given, Mapping) else given
    if field not in ("keep", "terms"):
        return _piece(field, given)
    return tuple(_piece(field, each) for each in (given if isinstance(given, list | tuple) else [given]))


def _piece(field: str, given: Any) -> Any:
    if callable(given):
        return given
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
    return _made(f"method.{field}.{name}", known[name], arguments or {})


def _made(called: str, kind: type, arguments: Mapping[str, Any]) -> Any:
    allowed = [each.name for each in fields(kind)]
    if unknown := sorted(set(arguments) - set(allowed)):
        takes = ", ".join(allowed) or "no argument"
        raise ValueError(f"`{called}` has {unknown[0]!r}, but takes {takes}.")
    return kind(**arguments)


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


def __getattr__(name: str) -> Any:
    if name == "SETTINGS":
        raise ImportError(
            '`SETTINGS` was removed: a method sets all that its source does, so `method="loop"` is enough.'
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "METHODS",
    "PIECES",
    "Clip",
    "ClipRange",
    "Experience",
    "Method",
    "MicroBatch",
    "Objective",
    "Ratio",
    "ScoredRollout",
    "method_from",
    "read_method",
    *sorted(each.__name__ for classes in _CLASSES.values() for each in classes),
]
