"""Methods, which consist of five pieces each: the pieces of this package, and the named methods made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from sorl_trl.methods.credit import GiGPO, GroupMean, LeaveOneOut, Separate
from sorl_trl.methods.data import ClipRange, MicroBatch, Objective, ScoredRollout
from sorl_trl.methods.keep import EngineTurnMask, EngineVeto, NotVoid, TopK, TopP, ZeroVariance
from sorl_trl.methods.method import Method
from sorl_trl.methods.surrogate import DPPO, DoubleSided, MiniRL, PPOMin
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
"""The pieces that a recipe can name, by field of `Method`."""

_NAMED = {  # all other methods consist of the default pieces
    "so_grpo": Method(terms=(ClipPenalty(),)),
    "so_ppo": Method(terms=(ClipPenalty(),)),
    "so_grpo_note": Method(terms=(ClipPenalty(coef=3.0, epsilon=None),)),
    "so_ppo_note": Method(terms=(ClipPenalty(coef=3.0, epsilon=None),)),
    "loop": Method(credit=LeaveOneOut()),
    "minirl": Method(surrogate=MiniRL(), weight=Unweighted()),
    "starpo_s": Method(keep=(TopK(0.25),)),
    "ragen2": Method(keep=(TopP(0.9),)),
    "dapo": Method(keep=(ZeroVariance(),)),
    "double_sided": Method(surrogate=DoubleSided()),
    "void": Method(keep=(NotVoid(),)),
    "gigpo": Method(credit=GiGPO()),
    "igpo": Method(credit=Separate()),
    "llds": Method(terms=(LLDS(),)),
    "dppo": Method(surrogate=DPPO(), weight=Unweighted()),
}
_TOKEN = {"importance_sampling_level": "token", "loss_type": "grpo", "epsilon": 0.2, "target_kl": 0.0}
_NOTE = {"turn_ratio": "arithmetic", "epsilon": 0.2, "target_kl": 0.0}
_ST = {"loss_type": "grpo", "epsilon": 0.2, "bias_norm": True, "target_kl": 0.0}
_SEQUENCE = {
    "importance_sampling_level": "sequence",
    "clip_range_scaling": "length",
    "epsilon": 0.2,
    "loss_type": "grpo",
}
_PPO = {"advantage_level": "token"}
SETTINGS: dict[str, dict[str, Any]] = {
    "so_grpo": {},
    "so_ppo": {},
    "so_grpo_note": _NOTE,
    "so_ppo_note": _NOTE,
    "sequence": _SEQUENCE,
    "sequence_ppo": _SEQUENCE,
    "grpo": _TOKEN,
    "gspo": _TOKEN | {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "st_grpo": _ST,
    "ppo": _TOKEN | _PPO | {"loss_type": "bnpo"},
    "turn_ppo": _ST | _PPO | {"bias_norm": False},
    "s_ppo": _ST | _PPO | {"importance_sampling_level": "token"},
    "st_ppo": _ST | _PPO,
    "loop": _TOKEN | {"epsilon": 1 - 1 / 1.1, "epsilon_high": 0.1, "scale_rewards": "none"},
    "reinforce": _TOKEN | {"scale_rewards": "batch", "loss_type": "dapo"},
    "minirl": _TOKEN | {"epsilon_high": 0.27, "loss_type": "dr_grpo", "scale_rewards": "none"},
    "starpo_s": _TOKEN | _PPO | {"epsilon_high": 0.28, "loss_type": "dapo"},
    "ragen2": _TOKEN,
    "dapo": _TOKEN | {"epsilon_high": 0.28, "loss_type": "dapo"},
    "double_sided": _TOKEN,
    "void": _TOKEN,
    "gigpo": _TOKEN | {"gamma": 0.95},
    "igpo": _TOKEN,
    "llds": _TOKEN,
    "dppo": _TOKEN | {"loss_type": "dapo"},
}
"""The config fields that the source of each named method sets: `SOGRPOConfig(**SETTINGS["loop"])`.

`sorl train --method NAME` uses them for fields that neither the recipe nor the command line sets. Methods with
`advantage_level` need `SOPPOTrainer`."""
METHODS = {name: replace(_NAMED.get(name, Method()), name=name) for name in SETTINGS}
"""The pieces of every named method. `SETTINGS` has the config fields that go with them."""


def method_from(value: Any) -> Method:
    """Build a method from a name of `METHODS`, a mapping of pieces, such a mapping in JSON, or a method.

    A mapping looks like {"credit": "leave_one_out", "terms": [{"clip_penalty": {"coef": 1.0}}]}.

    Raises:
        ValueError: A name is unknown, or a piece lacks a given argument.
    """
    if isinstance(value, Method):
        return value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _from_json(value)
    if isinstance(value, str):
        if value not in METHODS:
            raise ValueError(
                f"`method` is {value!r}, but must be one of {', '.join(METHODS)}, or a mapping of pieces."
            )
        return METHODS[value]
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
    if field not in ("keep", "terms"):
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


__all__ = [
    "LLDS",
    "METHODS",
    "SETTINGS",
    "ClipPenalty",
    "ClipRange",
    "DoubleSided",
    "EngineTurnMask",
    "EngineVeto",
    "GiGPO",
    "GroupMean",
    "LeaveOneOut",
    "Method",
    "MicroBatch",
    "MiniRL",
    "NotVoid",
    "Objective",
    "PPOMin",
    "ScoredRollout",
    "Separate",
    "TopK",
    "TopP",
    "TurnRatio",
    "Unweighted",
    "ZeroVariance",
    "method_from",
]
