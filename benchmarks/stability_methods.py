"""The methods that the stability benchmark compares, as settings of trainers.

No setting of a method was chosen by a judging seed: most were fixed before any ran, the controls were added to explain
what was seen. Which of the methods are the defaults was decided with judging seeds in view. `TRIALS` ran on choosing
seeds alone.

Titles tell apart what SORL specifies and what is ours: "as specified" is the note's form; "geometric" is that with the
other mean; "narrow" has a lower clip range of .05; "first defaults" a target KL too; "our defaults" have no penalty,
a target KL and a range that narrows with the turn, as the configs have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

GROUP = 8
"""Trajectories per prompt of the methods without a critic."""


@dataclass(frozen=True)
class Method:
    """`trainer` is "trl" (`trl.GRPOTrainer` as it is), "so_grpo" or "so_ppo"; `settings` are fields of its config."""

    title: str
    trainer: str
    description: str
    settings: dict[str, Any]
    tuned: bool = True
    """Whether its own learning rate is looked for; not that of a control."""
    guard: str = ""
    """What a `CollapseGuard` does in its runs; none where it is empty."""

    @property
    def family(self) -> str:
        return "ppo" if self.trainer == "so_ppo" else "grpo"


_SYMMETRIC = {"epsilon": 0.2, "epsilon_high": 0.2}
_NARROW = {"epsilon": 0.05, "epsilon_high": 0.2}
_MIDDLE = {"epsilon": 0.1, "epsilon_high": 0.4}
"""Of one token: by the root of four tokens, the narrow range."""
_AUTHORS = {"epsilon": 3e-4, "epsilon_high": 4e-4}
"""Of GSPO's authors (arXiv 2507.18071), for responses of thousands of tokens; `gspo` has TRL's range."""
_TOKEN = {"importance_sampling_level": "token", "loss_type": "grpo"}
_TURN = {"importance_sampling_level": "turn", "turn_ratio": "geometric", "loss_type": "turn"}
_SEQUENCE = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
_ARITHMETIC = {"turn_ratio": "arithmetic"}
_NONE = {"clip_normalization": "none"}
_PENALTY = {"clip_normalization": "kl_penalty", "ctn_coef": 3.0, "ctn_gate": "token", "kl_estimator": "unbiased"}
_PLAIN_KL = _PENALTY | {"ctn_gate": "none", "ctn_coef": 0.25}
"""The coefficient is lambda times the mean gate in SO-GRPO's choosing runs."""
_STRONG_KL = _PLAIN_KL | {"ctn_coef": 0.7}
"""The coefficient is what SO-GRPO's penalty puts on the KL in its choosing runs, lambda sum(f KL) / sum(KL):
about three times the above, because the gate is open where the KL is high."""
_TARGET = {"target_kl": 0.005}
"""Every other method has a learning rate that nothing adapts."""
_SO = _NARROW | _TURN | _PENALTY
_SPECIFIED = _SYMMETRIC | _TURN | _ARITHMETIC | _PENALTY
"""SORL as specified in the note, which leaves the coefficient and the estimator open: those are ours."""
_LENGTH, _SQRT = {"clip_range_scaling": "length"}, {"clip_range_scaling": "sqrt_length"}
_OWN_SEQUENCE = _SYMMETRIC | _SEQUENCE | _NONE
_BY_LENGTH = _OWN_SEQUENCE | _LENGTH | _TARGET
_DEFAULTS = _SYMMETRIC | _TURN | _NONE | _SQRT | _TARGET
_UNEVEN = _MIDDLE | _TURN | _NONE | _SQRT | _TARGET
_PENALIZED = _SYMMETRIC | _TURN | _PENALTY
_BIAS_NORM = {"clip_normalization": "bias_norm"}
_ST = _SYMMETRIC | _TURN | _BIAS_NORM | {"loss_type": "grpo"}
_TOKEN_PPO = {"advantage_level": "token", "loss_type": "grpo"}
_PPO = _TOKEN | _TOKEN_PPO | _NONE | {"loss_type": "bnpo"}
PPO_SETTINGS = {
    "num_generations": 1,
    "critic": "model",
    "critic_learning_rate": 1e-3,
    "critic_warmup_steps": 8,
    "value_clip_range": None,
}
"""Of all methods with a critic; docs/ppo.md says why. The critic keeps its learning rate whatever the policy's is."""


Row = tuple[str, str, str, dict[str, Any]]
"""Name, title, description, settings."""


def _methods(trainer: str, *rows: Row, tuned: bool = True) -> dict[str, Method]:
    return {name: Method(title, trainer, text, settings, tuned) for name, title, text, settings in rows}


_TRL_METHODS = _methods(
    "trl",
    ("grpo", "GRPO", "token ratios", _SYMMETRIC | {"loss_type": "grpo"}),
    ("dual_clip", "dual clip", "GRPO with delta = 4", _SYMMETRIC | {"loss_type": "grpo", "delta": 4.0}),
    ("gspo", "GSPO", "sequence ratios", _SYMMETRIC | _SEQUENCE),
    ("gspo_authors", "GSPO, its authors' range", "sequence ratios, clipped at 3e-4 and 4e-4", _AUTHORS | _SEQUENCE),
)
_TURN_METHODS = _methods(
    "so_grpo",
    ("so_grpo_specified", "SO-GRPO as specified", "the note's form, without our additions", _SPECIFIED),
    ("st_grpo", "ST-GRPO", "turn ratios, bias norm: ST-PPO without a critic", _ST),
    ("turn_geometric", "turn, geometric", "turn ratios alone", _SYMMETRIC | _TURN | _NONE),
    ("turn_arithmetic", "turn, arithmetic", "the note's ratios alone", _SYMMETRIC | _TURN | _NONE | _ARITHMETIC),
    ("s_grpo", "S-GRPO", "token ratios and the penalty", _SYMMETRIC | _TOKEN | _PENALTY),
    (
        "so_grpo_first",
        "SO-GRPO, first defaults",
        "turn ratios, penalty; ours: lower range .05, target KL",
        _SO | _TARGET,
    ),
    ("so_grpo_fixed", "SO-GRPO, narrow", "our first defaults without a target KL", _SO),
    ("so_grpo_arithmetic", "SO-GRPO, narrow, arithmetic", "the note's ratios, our lower range", _SO | _ARITHMETIC),
    ("sequence_penalty", "GSPO + penalty", "SO-GRPO, narrow, with sequence ratios", _NARROW | _SEQUENCE | _PENALTY),
    ("kl_control", "turn + plain KL", "SO-GRPO, narrow, whose penalty has no gate", _SO | _PLAIN_KL),
)
_SCALED_METHODS = _methods(
    "so_grpo",
    ("turn_sqrt", "turn, range / √length", "turn ratios alone, .2 / √tokens", _SYMMETRIC | _TURN | _NONE | _SQRT),
    ("gspo_length", "GSPO, range / length", "sequence ratios, .2 / tokens", _OWN_SEQUENCE | _LENGTH),
    (
        "so_grpo",
        "SO-GRPO, our defaults",
        "turn ratios; ours: range .2 / √tokens, target KL",
        _DEFAULTS,
    ),
    (
        "so_grpo_penalty",
        "our defaults + penalty",
        "SO-GRPO, our defaults, and SORL's penalty",
        _PENALIZED | _SQRT | _TARGET,
    ),
    (
        "gspo_length_target",
        "GSPO, range / length, target KL",
        "sequence ratios, .2 / tokens, target KL",
        _BY_LENGTH,
    ),
)
_CRITIC_METHODS = _methods(
    "so_ppo",
    ("ppo", "PPO", "token ratios, token GAE", _SYMMETRIC | _PPO),
    ("turn_ppo", "Turn-PPO", "turn ratios, token GAE", _SYMMETRIC | _TURN | _TOKEN_PPO | _NONE),
    ("s_ppo", "S-PPO", "token ratios, token GAE, bias norm", _SYMMETRIC | _TOKEN | _TOKEN_PPO | _BIAS_NORM),
    ("st_ppo", "ST-PPO", "turn ratios, token GAE, bias norm", _ST | _TOKEN_PPO),
    ("so_ppo_specified", "SO-PPO as specified", "the note's form, without our additions", _SPECIFIED),
    (
        "so_ppo_first",
        "SO-PPO, first defaults",
        "turn ratios, penalty; ours: lower range .05, target KL",
        _SO | _TARGET,
    ),
    ("so_ppo_fixed", "SO-PPO, narrow", "our first defaults without a target KL", _SO),
)
_SCALED_CRITIC_METHODS = _methods(
    "so_ppo",
    (
        "so_ppo",
        "SO-PPO, our defaults",
        "turn ratios and advantages; ours: range .2 / √tokens, target KL",
        _DEFAULTS,
    ),
)
_CONTROLS = (
    _methods(
        "trl",
        ("grpo_narrow", "GRPO, narrow", "lower range .05", _NARROW | {"loss_type": "grpo"}),
        ("gspo_narrow", "GSPO, narrow", "lower range .05", _NARROW | _SEQUENCE),
        tuned=False,
    )
    | _methods(
        "so_grpo",
        ("turn_narrow", "turn, narrow", "geometric turn ratios alone, lower range .05", _NARROW | _TURN | _NONE),
        (
            "so_grpo_symmetric",
            "SO-GRPO, geometric",
            "as specified, but geometric ratios",
            _SYMMETRIC | _TURN | _PENALTY,
        ),
        (
            "so_grpo_turn_gate",
            "SO-GRPO, narrow, turn gate",
            "gated by clipped turns",
            _SO | {"ctn_gate": "turn"},
        ),
        ("kl_control_strong", "turn + strong plain KL", "no gate, higher coefficient", _SO | _STRONG_KL),
        (
            "so_middle",
            "first defaults, .1 and .4 / √length",
            "turn ratios, penalty; ours: .1 below and .4 above, / √tokens, target KL",
            _MIDDLE | _TURN | _PENALTY | _SQRT | _TARGET,
        ),
        ("turn_middle", "first defaults, .1 and .4 / √length, no penalty", "the same without penalty", _UNEVEN),
        ("grpo_target", "GRPO + target KL", "GRPO and a target KL", _SYMMETRIC | _TOKEN | _NONE | _TARGET),
        tuned=False,
    )
    | _methods(
        "so_ppo",
        ("ppo_narrow", "PPO, narrow", "lower range .05", _NARROW | _PPO),
        ("so_ppo_symmetric", "SO-PPO, geometric", "as specified, but geometric ratios", _SO | _SYMMETRIC),
        ("so_ppo_token", "SO-PPO, narrow, token GAE", "GAE over tokens", _SO | {"advantage_level": "token"}),
        ("ppo_target", "PPO + target KL", "PPO and a target KL", _SYMMETRIC | _PPO | _TARGET),
        tuned=False,
    )
)
_ALL = _TRL_METHODS | _TURN_METHODS | _SCALED_METHODS | _CRITIC_METHODS | _SCALED_CRITIC_METHODS | _CONTROLS
METHODS = dict(sorted(_ALL.items(), key=lambda item: item[1].family))

GRPO_IN_OURS = Method("GRPO", "so_grpo", "token ratios in a trainer of ours", _SYMMETRIC | _TOKEN | _NONE)

_WIDE = {"epsilon": 0.2, "epsilon_high": 0.8}
"""The tuned range of turns of four tokens, .05 and .2, as that of one token."""
_TIGHT = {"epsilon": 0.05, "epsilon_high": 0.05}
_LOOSE = {"target_kl": 0.01}
TRIALS = _methods(
    "so_grpo",
    ("turn_length", "turn, range / length", ".2 both ways", _SYMMETRIC | _TURN | _NONE | _LENGTH),
    ("turn_length_wide", "turn, range / length, wide", ".2 and .8", _WIDE | _TURN | _NONE | _LENGTH),
    ("turn_sqrt_middle", "turn, range / √length, wide", ".1 and .4", _MIDDLE | _TURN | _NONE | _SQRT),
    ("gspo_sqrt", "GSPO, range / √length", ".2 both ways", _OWN_SEQUENCE | _SQRT),
    ("so_length", "SO-GRPO, range / length", "token gate", _PENALIZED | _LENGTH),
    ("so_sqrt", "SO-GRPO, range / √length", "token gate", _PENALIZED | _SQRT),
    ("so_length_turn_gate", "SO-GRPO, range / length, turn gate", "", _PENALIZED | _LENGTH | {"ctn_gate": "turn"}),
    (
        "so_length_open",
        "SO-GRPO, range / length, gate at .01 and .03",
        "nearly always open",
        _PENALIZED | _LENGTH | {"ctn_epsilon": 0.01, "ctn_epsilon_high": 0.03},
    ),
    ("so_length_plain", "turn, range / length + plain KL", "no gate, 0.7", _PENALIZED | _LENGTH | _STRONG_KL),
    ("so_length_target", "SO-GRPO, range / length, target KL", "", _PENALIZED | _LENGTH | _TARGET),
    ("turn_length_target", "turn, range / length, target KL", "", _SYMMETRIC | _TURN | _NONE | _LENGTH | _TARGET),
    ("turn_sqrt_loose", "turn, range / √length, target KL .01", "", _SYMMETRIC | _TURN | _NONE | _SQRT | _LOOSE),
    ("turn_length_tight", "turn, .05 / length, target KL", "", _TIGHT | _TURN | _NONE | _LENGTH | _TARGET),
    ("turn_sqrt_tight", "turn, .05 / √length, target KL", "", _TIGHT | _TURN | _NONE | _SQRT | _TARGET),
    ("gspo_sqrt_tight", "GSPO, .05 / √length, target KL", "", _TIGHT | _SEQUENCE | _NONE | _SQRT | _TARGET),
    ("turn_target", "turn, target KL", ".2 both ways", _SYMMETRIC | _TURN | _NONE | _TARGET),
    ("turn_loose", "turn, target KL .01", ".2 both ways", _SYMMETRIC | _TURN | _NONE | _LOOSE),
    ("gspo_target", "GSPO, target KL", ".2 both ways", _OWN_SEQUENCE | _TARGET),
    ("gspo_loose", "GSPO, target KL .01", ".2 both ways", _OWN_SEQUENCE | _LOOSE),
    ("gspo_length_loose", "GSPO, range / length, target KL .01", "", _OWN_SEQUENCE | _LENGTH | _LOOSE),
    ("gspo_sqrt_target", "GSPO, range / √length, target KL", "", _OWN_SEQUENCE | _SQRT | _TARGET),
    ("turn_of_tokens", "our defaults, mean over tokens", "", _DEFAULTS | {"loss_type": "grpo"}),
    ("gspo_of_turns", "GSPO, range / length, target KL, mean over turns", "", _BY_LENGTH | {"loss_type": "turn"}),
    ("grpo_loose", "GRPO, target KL .01", "", _SYMMETRIC | _TOKEN | _NONE | _LOOSE),
) | _methods(
    "candidate",
    (
        "coef_follows",
        "turn, range / length, λ follows the KL",
        "no gate, λ from 0.7",
        _PENALIZED | _LENGTH | _STRONG_KL | {"coef_target": 0.005},
    ),
    (
        "closing",
        "SO-GRPO, range / length, closing",
        "the penalty closes below a KL of .005",
        _PENALIZED | _LENGTH | {"closes_below": 0.005},
    ),
    (
        "early_stop",
        "turn, range / length, early stop",
        "a rollout's updates end above a KL of .02",
        _SYMMETRIC | _TURN | _NONE | _LENGTH | {"stop_above": 0.02},
    ),
    (
        "grpo_early_stop",
        "GRPO, early stop",
        "a rollout's updates end above a KL of .02",
        _SYMMETRIC | _TOKEN | _NONE | {"stop_above": 0.02},
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
            ("turn", "turn", _SYMMETRIC | _TURN | _NONE),
            ("turn_sqrt", "turn, range / √length", _SYMMETRIC | _TURN | _NONE | _SQRT),
            ("gspo_length", "GSPO, range / length", _OWN_SEQUENCE | _LENGTH),
        )
    ),
    (
        "turn_mask",
        "turn mask, range / length",
        "turns out of the range have no gradient, either way",
        _SYMMETRIC | _TURN | _NONE | _LENGTH | {"masks_units": True},
    ),
)
"""What looked for better defaults, on choosing seeds alone (`stability_trials.py`)."""

GUARDED = {
    f"grpo_{action}": replace(GRPO_IN_OURS, title=f"GRPO, guard: {action}", guard=action)
    for action in ("lower_lr", "roll_back")
}
"""What a guard is worth (`guard_actions.py`)."""
