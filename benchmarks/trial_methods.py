"""What looked for better defaults, on choosing seeds alone (`stability_trials.py`), as settings of trainers."""

from __future__ import annotations

from benchmarks.method_settings import (
    DEFAULTS,
    LENGTH,
    MIDDLE,
    NONE,
    OWN_SEQUENCE,
    PENALIZED,
    SEQUENCE,
    SQRT,
    STRONG_KL,
    SYMMETRIC,
    TARGET,
    TOKEN,
    TURN,
    methods,
)

_WIDE = {"epsilon": 0.2, "epsilon_high": 0.8}
"""The tuned range of turns of four tokens, .05 and .2, as that of one token."""
_TIGHT = {"epsilon": 0.05, "epsilon_high": 0.05}
_LOOSE = {"target_kl": 0.01}
_OF_TOKENS = {"loss_type": "grpo"}
_LENGTH_OF_TOKENS = TURN | NONE | LENGTH | TARGET | _OF_TOKENS
_SHARED = SYMMETRIC | TURN | NONE | LENGTH | TARGET | {"shares_range": True}
TRIALS = methods(
    "so_grpo",
    ("turn_length", "turn, range / length", ".2 both ways", SYMMETRIC | TURN | NONE | LENGTH),
    ("turn_length_wide", "turn, range / length, wide", ".2 and .8", _WIDE | TURN | NONE | LENGTH),
    ("turn_sqrt_middle", "turn, range / √length, wide", ".1 and .4", MIDDLE | TURN | NONE | SQRT),
    ("gspo_sqrt", "GSPO, range / √length", ".2 both ways", OWN_SEQUENCE | SQRT),
    ("so_length", "SO-GRPO, range / length", "token gate", PENALIZED | LENGTH),
    ("so_sqrt", "SO-GRPO, range / √length", "token gate", PENALIZED | SQRT),
    ("so_length_turn_gate", "SO-GRPO, range / length, turn gate", "", PENALIZED | LENGTH | {"ctn_gate": "turn"}),
    (
        "so_length_open",
        "SO-GRPO, range / length, gate at .01 and .03",
        "nearly always open",
        PENALIZED | LENGTH | {"ctn_epsilon": 0.01, "ctn_epsilon_high": 0.03},
    ),
    ("so_length_plain", "turn, range / length + plain KL", "no gate, 0.7", PENALIZED | LENGTH | STRONG_KL),
    ("so_length_target", "SO-GRPO, range / length, target KL", "", PENALIZED | LENGTH | TARGET),
    ("turn_length_target", "turn, range / length, target KL", "", SYMMETRIC | TURN | NONE | LENGTH | TARGET),
    ("turn_sqrt_loose", "turn, range / √length, target KL .01", "", SYMMETRIC | TURN | NONE | SQRT | _LOOSE),
    ("turn_length_tight", "turn, .05 / length, target KL", "", _TIGHT | TURN | NONE | LENGTH | TARGET),
    ("turn_sqrt_tight", "turn, .05 / √length, target KL", "", _TIGHT | TURN | NONE | SQRT | TARGET),
    ("gspo_sqrt_tight", "GSPO, .05 / √length, target KL", "", _TIGHT | SEQUENCE | NONE | SQRT | TARGET),
    ("turn_target", "turn, target KL", ".2 both ways", SYMMETRIC | TURN | NONE | TARGET),
    ("turn_loose", "turn, target KL .01", ".2 both ways", SYMMETRIC | TURN | NONE | _LOOSE),
    ("gspo_target", "GSPO, target KL", ".2 both ways", OWN_SEQUENCE | TARGET),
    ("gspo_loose", "GSPO, target KL .01", ".2 both ways", OWN_SEQUENCE | _LOOSE),
    ("gspo_length_loose", "GSPO, range / length, target KL .01", "", OWN_SEQUENCE | LENGTH | _LOOSE),
    ("gspo_sqrt_target", "GSPO, range / √length, target KL", "", OWN_SEQUENCE | SQRT | TARGET),
    ("tokens_length", "turn, range / length, target KL, mean over tokens", "", SYMMETRIC | _LENGTH_OF_TOKENS),
    ("tokens_tight", "turn, .05 / length, target KL, mean over tokens", "", _TIGHT | _LENGTH_OF_TOKENS),
    ("gspo_of_turns", "our defaults, mean over turns", "", DEFAULTS | {"loss_type": "turn"}),
    ("grpo_loose", "GRPO, target KL .01", "", SYMMETRIC | TOKEN | NONE | _LOOSE),
) | methods(
    "candidate",
    (
        "coef_follows",
        "turn, range / length, λ follows the KL",
        "no gate, λ from 0.7",
        PENALIZED | LENGTH | STRONG_KL | {"coef_target": 0.005},
    ),
    (
        "closing",
        "SO-GRPO, range / length, closing",
        "the penalty closes below a KL of .005",
        PENALIZED | LENGTH | {"closes_below": 0.005},
    ),
    (
        "early_stop",
        "turn, range / length, early stop",
        "a rollout's updates end above a KL of .02",
        SYMMETRIC | TURN | NONE | LENGTH | {"stop_above": 0.02},
    ),
    (
        "grpo_early_stop",
        "GRPO, early stop",
        "a rollout's updates end above a KL of .02",
        SYMMETRIC | TOKEN | NONE | {"stop_above": 0.02},
    ),
    *(
        (
            f"{name}_rollout{rest}",
            f"{title}, rollouts' KL {kl}",
            "learning rate set by rollout",
            of | {"rollout_kl": kl},
        )
        for rest, kl in (("", 0.005), ("_loose", 0.01))
        for name, title, of in (
            ("turn", "turn", SYMMETRIC | TURN | NONE),
            ("turn_sqrt", "turn, range / √length", SYMMETRIC | TURN | NONE | SQRT),
            ("gspo_length", "GSPO, range / length", OWN_SEQUENCE | LENGTH),
        )
    ),
    ("shared", "turn, .2 / length of trajectory, target KL", "", _SHARED),
    ("shared_tokens", "turn, .2 / length of trajectory, target KL, mean over tokens", "", _SHARED | _OF_TOKENS),
    (
        "turn_mask",
        "turn mask, range / length",
        "turns out of the range have no gradient, either way",
        SYMMETRIC | TURN | NONE | LENGTH | {"masks_units": True},
    ),
)
