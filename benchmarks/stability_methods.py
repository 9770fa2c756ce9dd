"""The methods that the stability benchmark compares, as settings of trainers.

No setting of a method was chosen by a judging seed: most were fixed before any ran, the controls were added to explain
what was seen, and those of other sources have the settings that their sources name. Which of the methods are the
defaults was decided with judging seeds in view. Those of
`trial_methods.py` ran on choosing seeds alone.

Titles tell apart what SORL specifies and what is ours: "as specified" is the note's form; "geometric" is that with the
other mean; "narrow" has a lower clip range of .05; "first defaults" a target KL too. "Turns" have a target KL, a range
that narrows with the turn, and no penalty: our second defaults. "Our defaults" are what the configs have today.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.method_settings import (
    ARITHMETIC,
    AUTHORS,
    BIAS_NORM,
    BY_TURN,
    DEFAULTS,
    LENGTH,
    MIDDLE,
    NARROW,
    NONE,
    OWN_SEQUENCE,
    PENALIZED,
    PENALTY,
    PLAIN_KL,
    PPO,
    SEQUENCE,
    SO,
    SPECIFIED,
    SQRT,
    ST,
    STRONG_KL,
    SYMMETRIC,
    TARGET,
    TOKEN,
    TOKEN_PPO,
    TURN,
    UNEVEN,
    Method,
    methods,
)
from benchmarks.other_methods import OTHER_METHODS

_TRL_METHODS = methods(
    "trl",
    ("grpo", "GRPO", "token ratios", SYMMETRIC | {"loss_type": "grpo"}),
    ("dual_clip", "dual clip", "GRPO with delta = 4", SYMMETRIC | {"loss_type": "grpo", "delta": 4.0}),
    ("gspo", "GSPO", "sequence ratios", SYMMETRIC | SEQUENCE),
    ("gspo_authors", "GSPO, its authors' range", "sequence ratios, clipped at 3e-4 and 4e-4", AUTHORS | SEQUENCE),
)
_TURN_METHODS = methods(
    "so_grpo",
    ("so_grpo_specified", "SO-GRPO as specified", "the note's form, without our additions", SPECIFIED),
    ("st_grpo", "ST-GRPO", "turn ratios, bias norm: ST-PPO without a critic", ST),
    ("turn_geometric", "turn, geometric", "turn ratios alone", SYMMETRIC | TURN | NONE),
    ("turn_arithmetic", "turn, arithmetic", "the note's ratios alone", SYMMETRIC | TURN | NONE | ARITHMETIC),
    ("s_grpo", "S-GRPO", "token ratios and the penalty", SYMMETRIC | TOKEN | PENALTY),
    (
        "so_grpo_first",
        "SO-GRPO, first defaults",
        "turn ratios, penalty; ours: lower range .05, target KL",
        SO | TARGET,
    ),
    ("so_grpo_fixed", "SO-GRPO, narrow", "our first defaults without a target KL", SO),
    ("so_grpo_arithmetic", "SO-GRPO, narrow, arithmetic", "the note's ratios, our lower range", SO | ARITHMETIC),
    ("sequence_penalty", "GSPO + penalty", "SO-GRPO, narrow, with sequence ratios", NARROW | SEQUENCE | PENALTY),
    ("kl_control", "turn + plain KL", "SO-GRPO, narrow, whose penalty has no gate", SO | PLAIN_KL),
)
_SCALED_METHODS = methods(
    "so_grpo",
    ("turn_sqrt", "turn, range / √length", "turn ratios alone, .2 / √tokens", SYMMETRIC | TURN | NONE | SQRT),
    ("gspo_length", "GSPO, range / length", "sequence ratios, .2 / tokens", OWN_SEQUENCE | LENGTH),
    (
        "so_grpo",
        "SO-GRPO, our defaults",
        "sequence ratios; ours: range .2 / tokens, target KL",
        DEFAULTS,
    ),
    (
        "so_grpo_turn",
        "SO-GRPO, turns",
        "our second defaults: turn ratios, range .2 / √tokens, target KL",
        BY_TURN,
    ),
    (
        "so_grpo_penalty",
        "SO-GRPO, turns + penalty",
        "our second defaults, and SORL's penalty",
        PENALIZED | SQRT | TARGET,
    ),
)
_CRITIC_METHODS = methods(
    "so_ppo",
    ("ppo", "PPO", "token ratios, token GAE", SYMMETRIC | PPO),
    ("turn_ppo", "Turn-PPO", "turn ratios, token GAE", SYMMETRIC | TURN | TOKEN_PPO | NONE),
    ("s_ppo", "S-PPO", "token ratios, token GAE, bias norm", SYMMETRIC | TOKEN | TOKEN_PPO | BIAS_NORM),
    ("st_ppo", "ST-PPO", "turn ratios, token GAE, bias norm", ST | TOKEN_PPO),
    ("so_ppo_specified", "SO-PPO as specified", "the note's form, without our additions", SPECIFIED),
    (
        "so_ppo_first",
        "SO-PPO, first defaults",
        "turn ratios, penalty; ours: lower range .05, target KL",
        SO | TARGET,
    ),
    ("so_ppo_fixed", "SO-PPO, narrow", "our first defaults without a target KL", SO),
)
_SCALED_CRITIC_METHODS = methods(
    "so_ppo",
    (
        "so_ppo",
        "SO-PPO, our defaults",
        "turn advantages, sequence ratios; ours: range .2 / tokens, target KL",
        DEFAULTS,
    ),
    (
        "so_ppo_turn",
        "SO-PPO, turns",
        "our second defaults: turn advantages, turn ratios, range .2 / √tokens, target KL",
        BY_TURN,
    ),
)
_CONTROLS = (
    methods(
        "trl",
        ("grpo_narrow", "GRPO, narrow", "lower range .05", NARROW | {"loss_type": "grpo"}),
        ("gspo_narrow", "GSPO, narrow", "lower range .05", NARROW | SEQUENCE),
        tuned=False,
    )
    | methods(
        "so_grpo",
        ("turn_narrow", "turn, narrow", "geometric turn ratios alone, lower range .05", NARROW | TURN | NONE),
        (
            "so_grpo_symmetric",
            "SO-GRPO, geometric",
            "as specified, but geometric ratios",
            SYMMETRIC | TURN | PENALTY,
        ),
        (
            "so_grpo_turn_gate",
            "SO-GRPO, narrow, turn gate",
            "gated by clipped turns",
            SO | {"ctn_gate": "turn"},
        ),
        ("kl_control_strong", "turn + strong plain KL", "no gate, higher coefficient", SO | STRONG_KL),
        (
            "so_middle",
            "first defaults, .1 and .4 / √length",
            "turn ratios, penalty; ours: .1 below and .4 above, / √tokens, target KL",
            MIDDLE | TURN | PENALTY | SQRT | TARGET,
        ),
        ("turn_middle", "first defaults, .1 and .4 / √length, no penalty", "the same without penalty", UNEVEN),
        ("turn_of_tokens", "SO-GRPO, turns, mean over tokens", "loss_type grpo", BY_TURN | {"loss_type": "grpo"}),
        ("grpo_target", "GRPO + target KL", "GRPO and a target KL", SYMMETRIC | TOKEN | NONE | TARGET),
        tuned=False,
    )
    | methods(
        "so_ppo",
        ("ppo_narrow", "PPO, narrow", "lower range .05", NARROW | PPO),
        ("so_ppo_symmetric", "SO-PPO, geometric", "as specified, but geometric ratios", SO | SYMMETRIC),
        ("so_ppo_token", "SO-PPO, narrow, token GAE", "GAE over tokens", SO | {"advantage_level": "token"}),
        ("ppo_target", "PPO + target KL", "PPO and a target KL", SYMMETRIC | PPO | TARGET),
        tuned=False,
    )
)
_ALL = (
    _TRL_METHODS
    | _TURN_METHODS
    | _SCALED_METHODS
    | _CRITIC_METHODS
    | _SCALED_CRITIC_METHODS
    | _CONTROLS
    | OTHER_METHODS
)
METHODS = dict(sorted(_ALL.items(), key=lambda item: item[1].family))

GRPO_IN_OURS = Method("GRPO", "so_grpo", "token ratios in a trainer of ours", SYMMETRIC | TOKEN | NONE)

GUARDED = {
    f"grpo_{action}": replace(GRPO_IN_OURS, title=f"GRPO, guard: {action}", guard=action)
    for action in ("lower_lr", "roll_back")
}
"""What a guard is worth (`guard_actions.py`)."""
