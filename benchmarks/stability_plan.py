"""The methods that the stability benchmark compares: settings of trainers, and the pieces of their `Method`.

No setting was chosen by a judging seed. Most were fixed before any ran, the controls were added to explain what was
seen, and those of other sources have what their sources name, with token ratios and no target KL unless they specify
otherwise.

Titles tell apart what SORL specifies and what is ours. "As specified" is the note's form; "geometric" is that with the
other mean; "narrow" has a lower clip range of .05; "first defaults" a target KL too. "Turns" have a target KL, a range
that narrows with the turn, and no penalty: the second defaults. "Sequence" has sequence ratios, a range that narrows
with the sequence and a target KL: the third. SO-GRPO and SO-PPO without a word after them are the configs' defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from examples.quickstart import LIMITS, ExpertNoise, WarmStartConfig

from benchmarks.worlds.hunt import HuntWorld
from benchmarks.worlds.questions import BenchmarkWorld, QuestionWorld
from benchmarks.worlds.working import HOPS, VERBOSITIES, WorkingWorld
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
        reward: of `sorl_trl.qa.REWARDS`, in place of the world's; empty: the world's.
        gain: whether each turn is also rewarded for its information gain.
        passes: how a rollout is used, overriding the regime: "one" update of all its trajectories, or a pass for
            each of the "turns" that a trajectory can have; empty: the regime's.
        follows: the method whose learning rate, update for update, is its own, of the same regime and seed.
    """

    title: str
    trainer: str
    description: str
    settings: dict[str, Any]
    method: Method
    reward: str = ""
    gain: bool = False
    passes: str = ""
    follows: str = ""

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
"""Of all methods with a critic; docs/how_to/critic.md explains why. The critic keeps its own learning rate."""

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
        name: BenchmarkMethod(title, trainer, text, fixed | settings, method) for name, title, text, settings in rows
    }


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
    ("sequence_ppo", "SO-PPO, sequence", "turn advantages, sequence ratios, .2 / tokens, target KL", BY_SEQUENCE),
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
_TWICE = {"refill_rounds": 2}
_LOOP = PLAIN | _UNSCALED | {"epsilon": 0.0909, "epsilon_high": 0.1}
_MINIRL = TOKEN | _UNSCALED | {"epsilon": 0.2, "epsilon_high": 0.27, "loss_type": "dr_grpo"}
_DAPO = TOKEN | HIGHER | {"loss_type": "dapo"} | _TWICE
_REINFORCE = PLAIN | {"scale_rewards": "batch", "loss_type": "dapo"}
_STARPO = TOKEN | HIGHER | TOKEN_PPO | {"loss_type": "dapo", "num_generations": 8}
_F1: dict[str, Any] = {"reward": "f1", "gain": True}
_REFILL: dict[str, Any] = {"trainer": "group_refill"}
_SEEUPO: dict[str, Any] = {"trainer": "seeupo", "passes": "turns"}
_Source = tuple[str, str, str, str, dict[str, Any], dict[str, Any]]
"""Name, title, description, whose `Method` it has, settings, and other fields."""
_SOURCES: tuple[_Source, ...] = (
    ("plain", "GRPO, in our trainer", "what the others here add to; their control", "grpo", PLAIN, {}),
    ("loop", "LOOP", "leave-one-out baseline, range .0909 and .1", "loop", _LOOP, {}),
    ("minirl", "MiniRL", "weighted policy gradient without a length in its mean", "minirl", _MINIRL, {}),
    ("top_k", "GRPO, top 25 % of groups", "StarPO-S's filter without its critic", "starpo_s", PLAIN, {}),
    ("top_p", "GRPO, top-p groups", "RAGEN-2's filter, 90 % of the variance", "ragen2", PLAIN, {}),
    (
        "refill",
        "DAPO, bounded refill",
        "range .2 and .28, mean over tokens, two refills at most",
        "dapo",
        _DAPO,
        _REFILL,
    ),
    ("gigpo", "GiGPO", "turns of one state compared too", "gigpo", PLAIN | {"gamma": 0.95}, {}),
    ("llds", "GRPO + LLDS", "the likelihood of good trajectories is held up", "llds", PLAIN, {}),
    ("double_sided", "GRPO, double-sided clip", "SAO's clip", "double_sided", PLAIN, {}),
    ("void", "GRPO, void trajectories masked", "SimpleTIR's mask", "void", PLAIN, {}),
    ("igpo", "IGPO", "information gain as turn rewards, outcome F1", "igpo", PLAIN, _F1),
    ("reinforce", "REINFORCE", "Search-R1++'s: one update per rollout", "reinforce", _REINFORCE, {"passes": "one"}),
    ("seeupo", "SeeUPO", "turn by turn, the last one first; turn ratios", "", SYMMETRIC, _SEEUPO),
    ("starpo_s", "StarPO-S", "PPO, range .2 and .28, top 25 % of groups", "starpo_s", _STARPO, {"trainer": "so_ppo"}),
)
_ON_SEQUENCE: tuple[_Source, ...] = (
    ("so_loop", "sequence, leave one out", "no scale: LOOP's advantages", "loop", BY_SEQUENCE | _UNSCALED, {}),
    ("so_llds", "sequence + LLDS", "the likelihood of good trajectories is held up", "llds", BY_SEQUENCE, {}),
    ("so_double", "sequence, double-sided clip", "SAO's clip", "double_sided", BY_SEQUENCE, {}),
    ("so_top_p", "sequence, top-p groups", "90 % of the variance", "ragen2", BY_SEQUENCE, {}),
    ("so_refill", "sequence, bounded refill", "two refills at most", "dapo", BY_SEQUENCE | _TWICE, _REFILL),
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


OTHERS = _of_sources(_SOURCES) | _of_sources(_ON_SEQUENCE)
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


CHOOSING_SEEDS = (101, 102, 103)
"""Choose learning rates. 101 and 102, with a few runs of seed 91, have chosen every other setting: coefficients, clip
ranges, the regimes' settings. None of them is in a table of results."""
JUDGING_SEEDS = (201, 202, 203, 204, 205, 206, 207, 208)
"""Chose no setting of a method. Eight, so that a paired test can speak; the first runs were of the first five. That
`sequence` is what held best was seen in those of questions and of `hunt-reuse`."""
_LONG_LIMITS = replace(LIMITS, max_turns=5, max_trajectory_tokens=192)
"""Four hops and one spare search."""
_LONG_WARM_START = WarmStartConfig(
    noise=ExpertNoise(missing_keyword=0.1, wrong_keyword=0.1, half_name=0.05, early_answer=0.05), limits=_LONG_LIMITS
)
SHORT = QuestionWorld("Questions", "one hop or two, turns of four tokens")
LONG = QuestionWorld(
    "Long questions", "three hops or four, turns of four tokens", (0.0, 0.0, 0.5, 0.5), _LONG_LIMITS, _LONG_WARM_START
)
HUNT = HuntWorld()


@dataclass(frozen=True)
class Regime:
    """A way to train, the same for all methods."""

    title: str
    description: str
    learning_rate: float
    """Of all its methods."""
    world: BenchmarkWorld = SHORT
    trajectories: int = 64
    """Per rollout."""
    minibatch: int = 16
    """Trajectories per update."""
    epochs: int = 2
    """How often each trajectory is used."""
    rollouts: int = 20
    staleness: int = 0
    """How many rollouts late each is trained on."""
    methods: tuple[str, ...] = tuple(METHODS)
    """The methods that are run in it, by name."""
    against_sampler: bool = False
    """Whether ratios compare with the engine's log-probabilities of its samples, not with the trainer's."""

    @property
    def updates(self) -> int:
        """Per rollout."""
        return self.trajectories // self.minibatch * self.epochs


_OF_HUNTS = (
    *("grpo", "gspo", "gspo_authors", "gspo_length", "turn_geometric", "turn_sqrt", "so_grpo_specified", "so_grpo"),
    *("sequence", "so_grpo_turn", "so_grpo_penalty", "so_grpo_first", "so_grpo_fixed", "grpo_target", "so_middle"),
    *("turn_middle", "turn_of_tokens", "ppo", "so_ppo_specified", "so_ppo", "sequence_ppo", "so_ppo_first"),
    *("so_ppo_turn", "so_ppo_fixed", "ppo_target", *(name for name in OTHERS if name not in OF_QUESTIONS)),
)


def _without_those_in_time(methods: Iterable[str]) -> tuple[str, ...]:
    """What can be trained on late rollouts."""
    return tuple(name for name in methods if name not in IN_TIME)


_GENTLE: dict[str, Any] = {"trajectories": 128, "minibatch": 32, "rollouts": 15}
_HUNTS: dict[str, Any] = {"world": HUNT, "methods": _OF_HUNTS}
REGIMES = {
    "gentle": Regime("Gentle", "8 updates per rollout at a moderate learning rate", 3e-4, **_GENTLE),
    "reuse": Regime("Reuse", "32 updates per rollout", 1e-3, epochs=8, rollouts=12),
    "stale": Regime(
        "Stale",
        "8 updates per rollout, each up to 6 rollouts late",
        1e-3,
        rollouts=32,
        staleness=6,
        methods=_without_those_in_time(METHODS),
    ),
    "hot": Regime("Hot", "as gentle, at a high learning rate", 2e-3, **_GENTLE),
    "long": Regime(
        "Long",
        "questions of 3 or 4 hops, 32 updates per rollout",
        5e-4,
        LONG,
        epochs=8,
        rollouts=12,
    ),
    "hunt-gentle": Regime("Hunts, gentle", "8 updates per rollout at a moderate rate", 3e-4, **_GENTLE, **_HUNTS),
    "hunt-reuse": Regime("Hunts, reuse", "32 updates per rollout", 1e-3, epochs=8, rollouts=15, **_HUNTS),
    "hunt-stale": Regime(
        "Hunts, stale",
        "8 updates per rollout, each up to 6 rollouts late",
        1e-3,
        rollouts=32,
        staleness=6,
        **_HUNTS | {"methods": _without_those_in_time(_OF_HUNTS)},
    ),
}

COMPARED = {
    "ratios alone": {"token": "grpo", "turn": "turn_sqrt", "sequence": "gspo_length"},
    "with a target KL": {"token": "grpo_target", "turn": "so_grpo_turn", "sequence": "sequence"},
}
"""Setting to the method of each level. Each level has the clip range that was chosen for it: 0.2 for tokens, divided
by the square root of the length for turns and by the length for sequences."""
LONG_TURNS = (40, 80)
"""Verbosities at which the methods of other sources are run too: sequences are weakest there."""


LENGTH_REGIMES = {
    f"turns-of-{verbosity}-in-{HOPS}-hops": Regime(
        f"Turns of {verbosity} tokens, {HOPS} hops",
        "16 updates per rollout",
        3e-4,
        world=WorkingWorld(verbosity),
        trajectories=32,
        minibatch=8,
        epochs=4,
        rollouts=5,
        methods=(
            *(name for of in COMPARED.values() for name in of.values()),
            *(OTHERS if verbosity in LONG_TURNS else ()),
        ),
    )
    for verbosity in VERBOSITIES
}
"""Of `turn_length`: the same questions with the same decisions, in turns of other lengths. Rollouts, their number and
the questions that judge are cut, by rules that were fixed before any judging run."""
ALL_REGIMES = REGIMES | LENGTH_REGIMES
"""All that can be run, whichever report it is for."""
