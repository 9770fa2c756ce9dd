"""Methods: their pieces by subject, the named ones in one file, and how a trainer finds its method."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from inspect import isclass
from typing import Any

from sorl_trl.checks import did_you_mean, import_named, is_dotted
from sorl_trl.methods.credit import GAE, AgentWise, Experience, GiGPO, GroupMean, LeaveOneOut, ZeroVariance
from sorl_trl.methods.data import Clip, ClipRange, MicroBatch, Objective, Ratio, ScoredRollout
from sorl_trl.methods.losses import (
    CISPO,
    SAPO,
    VESPO,
    ClipPenalty,
    PPOMin,
    constant_mean,
    micro_batch_mean,
    token_mean,
    token_sum,
    trajectory_mean,
    turn_mean,
)
from sorl_trl.methods.method import DECIDES, NUMBERS, SINGLE, Method
from sorl_trl.methods.named import METHODS

PIECES: Mapping[str, Mapping[str, Any]] = {
    "surrogate": {"ppo_min": PPOMin, "cispo": CISPO, "sapo": SAPO, "vespo": VESPO},
    "mean": {
        each.__name__: each
        for each in (turn_mean, trajectory_mean, constant_mean, token_mean, micro_batch_mean, token_sum)
    },
    "credit": {
        **{"group_mean": GroupMean, "leave_one_out": LeaveOneOut, "gigpo": GiGPO, "agent_wise": AgentWise},
        "gae": GAE,
    },
    "keep": {"zero_variance": ZeroVariance},
    "terms": {"clip_penalty": ClipPenalty},
}
"""The pieces that a recipe can name, by field of `Method`. Beside them it sets `ratio`, `clip` and numbers."""
_NO_GAIN = "runs of version 0.3 showed no gain"
_OF_ENGINE = "`vllm_importance_sampling_mode` corrects the engine's mismatch"
_GONE: Mapping[str, str] = {
    "double_sided": "its runs collapsed",
    **dict.fromkeys(("dppo", "engine_turn_mask", "engine_veto", "minirl", "unweighted"), _OF_ENGINE),
    **dict.fromkeys(("igpo", "separate"), "every method takes the reward of examples/information_gain.py"),
    "ma_rlhf": "benchmarks/results/macro_actions.md shows no gain over turns",
    **dict.fromkeys(("llds", "not_void", "void"), _NO_GAIN),
    **dict.fromkeys(("ragen2", "starpo_s"), f"{_NO_GAIN}; 'dapo' drops groups with equal rewards"),
    "reinforce": "it is 'grpo' with the mean `token_mean` and the credit `group_mean` of the scale 'batch'",
    "weight": _OF_ENGINE,
    **dict.fromkeys(("top_k", "top_p"), f"{_NO_GAIN}; 'zero_variance' drops groups with equal rewards"),
}
"""Methods and pieces that were removed since version 0.3, and why or what takes their place."""


def method_from(value: Any, config: Any) -> Method:
    """A trainer's method: a name of `METHODS`, a mapping of pieces, such a mapping in JSON, or a method.

    A mapping looks like {"credit": "leave_one_out", "clip": {"low": 0.2}, "terms": [{"clip_penalty": {"coef": 1.0}}]}.
    Its pieces replace those that the config describes or, with a `name`, those of a named method. A method or a piece
    of your own is named by its dotted path: "my_module.my_method", {"credit": "my_module.best_of_group"}.

    Raises:
        ValueError: A name is unknown, a piece lacks a given argument, or a field of the config asks for another piece
            than the method decides: all of them, or those of a mapping without a name.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _from_json(value)
    if not isinstance(value, Method | str | Mapping):
        raise ValueError(f"`method` is {value!r}, but must be a name or a mapping of pieces ({', '.join(DECIDES)}).")
    given = value if isinstance(value, Mapping) else {"name": value}
    pieces = {field: _pieces(field, each) for field, each in given.items() if field != "name"}
    start = _named(given["name"]) if "name" in given else Method.from_config(config)
    method = replace(start, **pieces)
    method.check_decided(config, DECIDES if "name" in given else pieces)
    return method if method.name else replace(method, name=_name_of(method))


def _name_of(method: Method) -> str:
    return next((name for name, each in METHODS.items() if each == method), "")


def _named(name: Any) -> Method:
    if isinstance(name, Method):
        return name
    if is_dotted(name):
        method = import_named("method", name)
        if not isinstance(method, Method):
            raise ValueError(f"`method` is {name!r}, but that is a {type(method).__name__}, not a `Method`.")
        return method
    if not isinstance(name, str) or name not in METHODS:
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
        raise ValueError(
            f"`method` has {field!r}, but must be made of {', '.join(DECIDES)}, and perhaps a `name`"
            f"{_advice(field, DECIDES)}"
        )
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
    known, called = PIECES[field], f"method.{field}.{name}"
    if not isinstance(arguments, Mapping | None):
        raise ValueError(f"`{called}` is {arguments!r}, but must be a mapping of its arguments.")
    if is_dotted(name):
        return _made(called, import_named(f"method.{field}", name), arguments or {})
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"`method.{field}` is {given!r}, but must be one of {', '.join(known)}, with its arguments, or the dotted "
            f"path of your own{_advice(str(name), known)}"
        )
    return _made(called, known[name], arguments or {})


def _made(called: str, piece: Any, arguments: Mapping[str, Any]) -> Any:
    """A function unchanged; a class, such as a dataclass with settings, called with its arguments."""
    if not isclass(piece):
        if arguments:
            raise ValueError(f"`{called}` has {sorted(arguments)}, but only a class takes arguments.")
        return piece
    allowed = [each.name for each in fields(piece)] if is_dataclass(piece) else [*arguments]
    if unknown := sorted({*arguments} - {*allowed}):
        raise ValueError(f"`{called}` has {unknown[0]!r}, but takes {', '.join(allowed) or 'no argument'}.")
    try:
        return piece(**arguments)
    except TypeError as error:
        raise ValueError(f"`{called}` cannot be made with {dict(arguments)}: {error}.") from error


def __getattr__(name: str) -> Any:
    if name == "SETTINGS":
        raise ImportError(
            '`SETTINGS` was removed: a method sets all that its source does, so `method="loop"` is enough.'
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CISPO",
    "GAE",
    "METHODS",
    "PIECES",
    "SAPO",
    "VESPO",
    "AgentWise",
    "Clip",
    "ClipPenalty",
    "ClipRange",
    "Experience",
    "GiGPO",
    "GroupMean",
    "LeaveOneOut",
    "Method",
    "MicroBatch",
    "Objective",
    "PPOMin",
    "Ratio",
    "ScoredRollout",
    "ZeroVariance",
    "constant_mean",
    "method_from",
    "micro_batch_mean",
    "token_mean",
    "token_sum",
    "trajectory_mean",
    "turn_mean",
]
