"""The methods that the stability benchmark compares: settings of trainers, and the pieces of their `Method`.

No setting was chosen by a judging seed. Most were fixed before any ran, the controls were added to explain what was
seen, and those of other sources have what their sources name, with token ratios and no target KL unless they say
otherwise.

Titles tell apart what SORL specifies and what is ours. "As specified" is the note's form; "geometric" is that with the
other mean; "narrow" has a lower clip range of .05; "first defaults" a target KL too. "Turns" have a target KL, a range
that narrows with the turn, and no penalty: the second defaults. "Sequence" has sequence ratios, a range that narrows
with the sequence and a target KL: the third. SO-GRPO and SO-PPO without a word after them are the configs' defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sorl_trl.methods import METHODS as PUBLISHED
from sorl_trl.methods import ClipPenalty, Method


@dataclass(frozen=True)
class BenchmarkMethod:
    """One line of the tables.

    Args:
        title: in tables.
        trainer: "trl" (`trl.GRPOTrainer`), "so_grpo", "so_ppo", "seeupo" or "group_refill".
        description: in the report.
        settings: fields of the trainer's config.
        method: what the trainers of this package are given; TRL's has none.
        tuned: whether its own learning rate is looked for; not that of a control.
        reward: of `sorl_trl.qa.REWARDS`, in place of the world's; empty: the world's.
        gain: whether each turn is also rewarded for its information gain.
        passes: how a rollout is used, whatever the regime says: "one" update of all its trajectories, or a pass for
            each of the "turns" that a trajectory can have; empty: as the regime says.
    """

    title: str
    trainer: str
    description: str
    settings: dict[str, Any]
    method: Method
    tuned: bool = True
    reward: str = ""
    gain: bool = False
    passes: str = ""

    @property
    def family(self) -> str:
        return "ppo" if self.trainer == "so_ppo" else "grpo"


GROUP = 8
"""Trajectories per prompt of the methods without a critic."""
PPO_SETTINGS = {
    "num_generations": 1,
    "critic": "model",
    "critic_learning_rate": 1e-3,
    "critic_warmup_steps": 8,
    "value_clip_range": None,
}
"""Of all methods with a critic; docs/ppo.md says why. The critic keeps its learning rate whatever the policy's is."""

UNSET = {"target_kl": 0.0, "clip_range_scaling": "none"}
"""What trainers of ours do unless told otherwise is told otherwise."""
SYMMETRIC = {"epsilon": 0.2, "epsilon_high": 0.2}
NARROW = {"epsilon": 0.05, "epsilon_high": 0.2}
MIDDLE = {"epsilon": 0.1, "epsilon_high": 0.4}
"""Of one token: by the root of four tokens, the narrow range."""
HIGHER = {"epsilon": 0.2, "epsilon_high": 0.28}
AUTHORS = {"epsilon": 3e-4, "epsilon_high": 4e-4}
"""Of GSPO's authors (arXiv 2507.18071), for responses of thousands of tokens; `gspo` has TRL's range."""
TOKEN = {"importance_sampling_level": "token", "loss_type": "grpo"}
TURN = {"importance_sampling_level": "turn", "turn_ratio": "geometric", "loss_type": "turn"}
SEQUENCE = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
ARITHMETIC = {"turn_ratio": "arithmetic"}
TARGET = {"target_kl": 0.005}
"""Without it nothing adapts the learning rate."""
LENGTH, SQRT = {"clip_range_scaling": "length"}, {"clip_range_scaling": "sqrt_length"}
BIAS_NORM = {"bias_norm": True}
TOKEN_PPO = {"advantage_level": "token", "loss_type": "grpo"}
PPO = TOKEN | TOKEN_PPO | {"loss_type": "bnpo"}

SPECIFIED = SYMMETRIC | TURN | ARITHMETIC
"""SORL as specified in the note, which leaves the penalty's coefficient and estimator open: those are ours."""
PLAIN = SYMMETRIC | TOKEN
SO = NARROW | TURN
ST = SYMMETRIC | TURN | BIAS_NORM | {"loss_type": "grpo"}
BY_TURN = SYMMETRIC | TURN | SQRT | TARGET
BY_SEQUENCE = SYMMETRIC | SEQUENCE | LENGTH | TARGET

NO_PIECES = Method()
PENALTY = Method(terms=(ClipPenalty(coef=3.0, epsilon=None),))
"""As the note has it: gated by what the config's range clips."""
PLAIN_KL = Method(terms=(ClipPenalty(coef=0.25, gate="none"),))
"""The coefficient is the penalty's times the mean gate in SO-GRPO's choosing runs."""
STRONG_KL = Method(terms=(ClipPenalty(coef=0.7, gate="none"),))
"""The coefficient is what the penalty puts on the KL in those runs, about three times the above: the gate is open
where the KL is high."""
TURN_GATE = Method(terms=(ClipPenalty(coef=3.0, gate="turn", epsilon=None),))

Row = tuple[str, str, str, dict[str, Any]]
"""Name, title, description, settings."""


def methods(trainer: str, rows: Iterable[Row], method: Method = NO_PIECES) -> dict[str, BenchmarkMethod]:
    fixed = {} if trainer == "trl" else UNSET
    return {
        name: BenchmarkMethod(title, trainer, text, fixed | settings, method, tuned=name not in CONTROLS)
        for name, title, text, settings in rows
    }


CONTROLS = (
    *("grpo_narrow", "gspo_narrow", "turn_narrow", "turn_middle", "turn_of_tokens", "grpo_target", "so_middle"),
    *("so_grpo_symmetric", "so_grpo_turn_gate", "kl_control_strong", "ppo_narrow", "ppo_target", "so_ppo_symmetric"),
    "so_ppo_token",
)
"""Whose own learning rate is not looked for."""
_TRL: tuple[Row, ...] = (
    ("grpo", "GRPO", "token ratios", SYMMETRIC | {"loss_type": "grpo"}),
    ("dual_clip", "dual clip", "GRPO with delta = 4", SYMMETRIC | {"loss_type": "grpo", "delta": 4.0}),
    ("gspo", "GSPO", "sequence ratios", SYMMETRIC | SEQUENCE),
    ("gspo_authors", "GSPO, its authors' range", "sequence ratios, clipped at 3e-4 and 4e-4", AUTHORS | SEQUENCE),
    ("grpo_narrow", "GRPO, narrow", "lower range .05", NARROW | {"loss_type": "grpo"}),
    ("gspo_narrow", "GSPO, narrow", "lower range .05", NARROW | SEQUENCE),
)
_PENALIZED: tuple[Row, ...] = (
    ("so_grpo_specified", "SO-GRPO as specified", "the note's form, without our additions", SPECIFIED),
    ("so_grpo_symmetric", "SO-GRPO, geometric", "as specified, but geometric ratios", SYMMETRIC | TURN),
    ("s_grpo", "S-GRPO", "token ratios and the penalty", PLAIN),
    ("so_grpo_first", "SO-GRPO, first defaults", "turn ratios, penalty; lower range .05, target KL", SO | TARGET),
    ("so_grpo_fixed", "SO-GRPO, narrow", "the first defaults without a target KL", SO),
    ("so_grpo_arithmetic", "SO-GRPO, narrow, arithmetic", "the note's ratios, lower range .05", SO | ARITHMETIC),
    ("sequence_penalty", "GSPO + penalty", "SO-GRPO, narrow, with sequence ratios", NARROW | SEQUENCE),
    ("so_grpo_penalty", "SO-GRPO, turns + penalty", "the second defaults, and SORL's penalty", BY_TURN),
    ("so_middle", "first defaults, .1 and .4 / √length", "penalty, target KL, that range", BY_TURN | MIDDLE),
)
_RATIOS: tuple[Row, ...] = (
    ("grpo_target", "GRPO + target KL", "GRPO and a target KL", PLAIN | TARGET),
    ("st_grpo", "ST-GRPO", "turn ratios, bias norm: ST-PPO without a critic", ST),
    ("turn_geometric", "turn, geometric", "turn ratios alone", SYMMETRIC | TURN),
    ("turn_arithmetic", "turn, arithmetic", "the note's ratios alone", SPECIFIED),
    ("turn_narrow", "turn, narrow", "geometric turn ratios alone, lower range .05", SO),
    ("turn_sqrt", "turn, range / √length", "turn ratios alone, .2 / √tokens", SYMMETRIC | TURN | SQRT),
    ("gspo_length", "GSPO, range / length", "sequence ratios, .2 / tokens", SYMMETRIC | SEQUENCE | LENGTH),
    ("sequence", "sequence", "sequence ratios, range .2 / tokens, target KL", BY_SEQUENCE),
    ("so_grpo_turn", "SO-GRPO, turns", "the second defaults: turn ratios, range .2 / √tokens, target KL", BY_TURN),
    ("turn_middle", "turns, .1 and .4 / √length", "turn ratios, target KL, that range", BY_TURN | MIDDLE),
    ("turn_of_tokens", "SO-GRPO, turns, mean over tokens", "loss_type grpo", BY_TURN | {"loss_type": "grpo"}),
)
_CRITIC: tuple[Row, ...] = (
    ("ppo", "PPO", "token ratios, token GAE", SYMMETRIC | PPO),
    ("ppo_narrow", "PPO, narrow", "lower range .05", NARROW | PPO),
    ("ppo_target", "PPO + target KL", "PPO and a target KL", SYMMETRIC | PPO | TARGET),
    ("turn_ppo", "Turn-PPO", "turn ratios, token GAE", SYMMETRIC | TURN | TOKEN_PPO),
    ("s_ppo", "S-PPO", "token ratios, token GAE, bias norm", SYMMETRIC | TOKEN | TOKEN_PPO | BIAS_NORM),
    ("st_ppo", "ST-PPO", "turn ratios, token GAE, bias norm", ST | TOKEN_PPO),
    (
        "sequence_ppo",
        "SO-PPO, sequence",
        "turn advantages, sequence ratios, range .2 / tokens, target KL",
        BY_SEQUENCE,
    ),
    ("so_ppo_turn", "SO-PPO, turns", "the second defaults: turn advantages and ratios, range .2 / √tokens", BY_TURN),
)
_PENALIZED_CRITIC: tuple[Row, ...] = (
    ("so_ppo_specified", "SO-PPO as specified", "the note's form, without our additions", SPECIFIED),
    ("so_ppo_symmetric", "SO-PPO, geometric", "as specified, but geometric ratios", SYMMETRIC | TURN),
    ("so_ppo_first", "SO-PPO, first defaults", "turn ratios, penalty; lower range .05, target KL", SO | TARGET),
    ("so_ppo_fixed", "SO-PPO, narrow", "the first defaults without a target KL", SO),
    ("so_ppo_token", "SO-PPO, narrow, token GAE", "GAE over tokens", SO | {"advantage_level": "token"}),
)
_GATES = (
    (("kl_control", "turn + plain KL", "SO-GRPO, narrow, without a gate", SO), PLAIN_KL),
    (("kl_control_strong", "turn + strong plain KL", "no gate, higher coefficient", SO), STRONG_KL),
    (("so_grpo_turn_gate", "SO-GRPO, narrow, turn gate", "gated by clipped turns", SO), TURN_GATE),
)

_UNSCALED = {"scale_rewards": "none"}
_F1: dict[str, Any] = {"reward": "f1", "gain": True}
_Source = tuple[str, str, str, str, dict[str, Any], dict[str, Any]]
"""Name, title, description, whose `Method` it has, settings, and other fields."""
_SOURCES: tuple[_Source, ...] = (
    ("plain", "GRPO, in our trainer", "what the others here add to; their control", "grpo", PLAIN, {}),
    (
        "loop",
        "LOOP",
        "leave-one-out baseline, range .0909 and .1",
        "loop",
        PLAIN | _UNSCALED | {"epsilon": 0.0909, "epsilon_high": 0.1},
        {},
    ),
    (
        "minirl",
        "MiniRL",
        "weighted policy gradient without a length in its mean",
        "minirl",
        TOKEN | _UNSCALED | {"epsilon": 0.2, "epsilon_high": 0.27, "loss_type": "dr_grpo"},
        {},
    ),
    ("top_k", "GRPO, top 25 % of groups", "StarPO-S's filter without its critic", "starpo_s", PLAIN, {}),
    ("top_p", "GRPO, top-p groups", "RAGEN-2's filter, 90 % of the variance", "ragen2", PLAIN, {}),
    (
        "refill",
        "DAPO, bounded refill",
        "range .2 and .28, mean over tokens, groups that agree asked again at most twice",
        "dapo",
        TOKEN | HIGHER | {"loss_type": "dapo", "refill_rounds": 2},
        {"trainer": "group_refill"},
    ),
    ("gigpo", "GiGPO", "turns of one state compared too", "gigpo", PLAIN | {"gamma": 0.95}, {}),
    ("llds", "GRPO + LLDS", "the likelihood of good trajectories is held up", "llds", PLAIN, {}),
    ("double_sided", "GRPO, double-sided clip", "SAO's clip", "double_sided", PLAIN, {}),
    ("void", "GRPO, void trajectories masked", "SimpleTIR's mask", "void", PLAIN, {}),
    ("igpo", "IGPO", "information gain as turn rewards, outcome F1", "igpo", PLAIN, _F1),
    (
        "reinforce",
        "REINFORCE",
        "Search-R1++'s: one update per rollout, advantages scaled over the batch",
        "reinforce",
        PLAIN | {"scale_rewards": "batch", "loss_type": "dapo"},
        {"passes": "one"},
    ),
    (
        "seeupo",
        "SeeUPO",
        "turn by turn, the last one first; turn ratios",
        "",
        SYMMETRIC,
        {"trainer": "seeupo", "passes": "turns"},
    ),
    (
        "starpo_s",
        "StarPO-S",
        "PPO, range .2 and .28, top 25 % of groups",
        "starpo_s",
        TOKEN | HIGHER | TOKEN_PPO | {"loss_type": "dapo", "num_generations": 8},
        {"trainer": "so_ppo"},
    ),
)
_ON_SEQUENCE: tuple[_Source, ...] = (
    ("so_loop", "sequence, leave one out", "no scale: LOOP's advantages", "loop", BY_SEQUENCE | _UNSCALED, {}),
    ("so_llds", "sequence + LLDS", "the likelihood of good trajectories is held up", "llds", BY_SEQUENCE, {}),
    ("so_double", "sequence, double-sided clip", "SAO's clip", "double_sided", BY_SEQUENCE, {}),
    ("so_top_p", "sequence, top-p groups", "90 % of the variance", "ragen2", BY_SEQUENCE, {}),
    (
        "so_refill",
        "sequence, bounded refill",
        "groups that agree asked again at most twice",
        "dapo",
        BY_SEQUENCE | {"refill_rounds": 2},
        {"trainer": "group_refill"},
    ),
    ("so_gigpo", "sequence, GiGPO's turns", "turns of one state too", "gigpo", BY_SEQUENCE | {"gamma": 0.95}, {}),
    ("so_steps", "sequence, GiGPO's turns, γ = 1", "the same without a discount", "gigpo", BY_SEQUENCE, {}),
    ("so_gamma", "sequence, γ = .95", "the control of GiGPO's turns", "sequence", BY_SEQUENCE | {"gamma": 0.95}, {}),
    ("so_void", "sequence, void trajectories masked", "SimpleTIR's mask", "void", BY_SEQUENCE, {}),
    ("so_igpo", "sequence, information gain", "outcome F1", "igpo", BY_SEQUENCE, _F1),
)


def _of_sources(sources: Iterable[_Source], **more: Any) -> dict[str, BenchmarkMethod]:
    """Methods whose pieces are those of `sorl_trl.methods.METHODS`."""
    found = {}
    for name, title, text, published, settings, fields in sources:
        method = PUBLISHED[published] if published else NO_PIECES
        given = {"trainer": "so_grpo", **more, **fields}
        found[name] = BenchmarkMethod(title, description=text, settings=UNSET | settings, method=method, **given)
    return found


OTHERS = _of_sources(_SOURCES) | _of_sources(_ON_SEQUENCE, tuned=False)
"""Of other sources than SORL: each as its source has it, and as `so_…` on top of `sequence`."""
_DEFAULTS = {
    "so_grpo": BenchmarkMethod("SO-GRPO", "so_grpo", "what `SOGRPOConfig()` trains", {}, PUBLISHED["so_grpo"]),
    "so_ppo": BenchmarkMethod("SO-PPO", "so_ppo", "what `SOPPOConfig()` trains", {}, PUBLISHED["so_ppo"]),
}
_ALL = _DEFAULTS | methods("trl", _TRL) | methods("so_grpo", _PENALIZED, PENALTY) | methods("so_grpo", _RATIOS)
_ALL |= {name: method for row, pieces in _GATES for name, method in methods("so_grpo", [row], pieces).items()}
_ALL |= methods("so_ppo", _CRITIC) | methods("so_ppo", _PENALIZED_CRITIC, PENALTY) | OTHERS
METHODS = dict(sorted(_ALL.items(), key=lambda item: (item[1].family, item[0] != item[1].family)))
"""Name to method, those without a critic first, and each family's baseline before the others."""
OF_QUESTIONS = ("igpo", "void", "so_igpo", "so_void")
"""What hunts have no use for: they have no answers and no `SearchRollout`."""
IN_TIME = tuple(name for name, method in METHODS.items() if method.passes == "turns")
"""What cannot be trained on late rollouts: it takes the old log-probabilities again, turn by turn."""
