"""A method as a recipe or a command line writes it: a name, or a mapping of piece to name and arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sorl_trl.methods.credit import GiGPO, GroupMean, LeaveOneOut, Separate
from sorl_trl.methods.dppo import DPPO
from sorl_trl.methods.keep import EngineTurnMask, EngineVeto, NotVoid, TopK, TopP, ZeroVariance
from sorl_trl.methods.method import Method
from sorl_trl.methods.surrogate import DoubleSided, MiniRL, PPOMin
from sorl_trl.methods.terms import LLDS, ClipPenalty
from sorl_trl.methods.weight import TurnRatio, Unweighted

PIECES: dict[str, dict[str, type]] = {
    "credit": {"group_mean": GroupMean, "leave_one_out": LeaveOneOut, "gigpo": GiGPO, "separate": Separate},
    "keep": {
        "zero_variance": ZeroVariance,
        "top_k": TopK,
        "top_p": TopP,
        "not_void": NotVoid,
        "engine_veto": EngineVeto,
        "engine_turn_mask": EngineTurnMask,
    },
    "weight": {"turn_ratio": TurnRatio, "unweighted": Unweighted},
    "surrogate": {"ppo_min": PPOMin, "double_sided": DoubleSided, "minirl": MiniRL, "dppo": DPPO},
    "terms": {"clip_penalty": ClipPenalty, "llds": LLDS},
}
"""Field of `Method` to the pieces that a recipe can name for it."""
_SEVERAL = ("keep", "terms")


def method_from(value: Any, named: Mapping[str, Method]) -> Method:
    """Build a method from a name, a mapping, JSON of a mapping, or a method.

    Args:
        value: such as "loop" or {"credit": "leave_one_out", "terms": [{"clip_penalty": {"coef": 1.0}}]}.
        named: the methods that a name may stand for.

    Raises:
        ValueError: a name that is not there, or an argument that a piece does not have.
    """
    if isinstance(value, Method):
        return value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _from_json(value)
    if isinstance(value, str):
        if value not in named:
            raise ValueError(f"`method` is {value!r}, but must be one of {', '.join(named)}, or a mapping of pieces.")
        return named[value]
    if not isinstance(value, Mapping):
        raise ValueError(f"`method` is {value!r}, but must be a name or a mapping of pieces ({', '.join(PIECES)}).")
    return Method(**{field: _pieces(field, given) for field, given in value.items()})


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"`method` is {text!r}, but must be a name or JSON: {error}.") from None


def _pieces(field: str, given: Any) -> Any:
    if field not in PIECES:
        raise ValueError(f"`method` has {field!r}, but must be made of {', '.join(PIECES)}.")
    if field not in _SEVERAL:
        return _piece(field, given)
    return tuple(_piece(field, each) for each in (given if isinstance(given, list | tuple) else [given]))


def _piece(field: str, given: Any) -> Any:
    name, arguments = next(iter(given.items())) if isinstance(given, Mapping) and len(given) == 1 else (given, {})
    known = PIECES[field]
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"`method.{field}` is {given!r}, but must be one of {', '.join(known)}, with its arguments.")
    if not isinstance(arguments, Mapping | None):
        raise ValueError(f"`method.{field}.{name}` is {arguments!r}, but must be a mapping of its arguments.")
    allowed = [each.name for each in fields(known[name])]
    if unknown := sorted(set(arguments or {}) - set(allowed)):
        takes = ", ".join(allowed) or "no argument"
        raise ValueError(f"`method.{field}.{name}` has {unknown[0]!r}, but takes {takes}.")
    return known[name](**(arguments or {}))
