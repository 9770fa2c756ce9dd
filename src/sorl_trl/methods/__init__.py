"""Methods: five pieces that compose, and the methods of SORL and of others as choices of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sorl_trl.methods import parsing
from sorl_trl.methods.credit import GiGPO, GroupMean, LeaveOneOut, Separate
from sorl_trl.methods.data import ClipRange, MicroBatch, Objective, ScoredRollout
from sorl_trl.methods.dppo import DPPO
from sorl_trl.methods.keep import EngineTurnMask, EngineVeto, NotVoid, TopK, TopP, ZeroVariance
from sorl_trl.methods.method import Method
from sorl_trl.methods.surrogate import DoubleSided, MiniRL, PPOMin
from sorl_trl.methods.terms import LLDS, ClipPenalty
from sorl_trl.methods.weight import TurnRatio, Unweighted

_PIECES = {  # of the others, all pieces are the defaults
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

`sorl train --method NAME` takes them for what neither the recipe nor the command line gives. Methods with
`advantage_level` are for `SOPPOTrainer`."""
METHODS = {name: replace(_PIECES.get(name, Method()), name=name) for name in SETTINGS}
"""Every named method as its pieces. What else its source sets is in `SETTINGS`."""


def method_from(value: Any) -> Method:
    """Build a method from a name of `METHODS`, a mapping of pieces, JSON of one, or a method.

    Raises:
        ValueError: a name that is not there, or an argument that a piece does not have.
    """
    return parsing.method_from(value, METHODS)


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
