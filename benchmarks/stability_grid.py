"""What the stability benchmark runs: regimes, methods, learning rates and seeds.

Regimes, the methods' settings and the definition of a collapse were fixed before the judging seeds were run. The
controls were added while they ran, to explain what was seen; none of their settings was chosen by a judging seed.

Titles tell apart what SORL specifies and what is ours: "as specified" is the note's form; "geometric" is that with the
other mean; "narrow" has our lower clip range; "our defaults" has our target KL too, as the configs have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.worlds import BenchmarkWorld, QuestionWorld
from sorl_trl.sandbox import LONG_LIMITS, ExpertNoise, WarmStartConfig

CHOOSING_SEEDS = (101, 102)
"""Chose every setting, with a few runs of seed 91: learning rates, coefficients, clip ranges, the regimes' settings.
In no table of results. Of about 60 runs that looked for settings (one or two seeds, reuse, long, hot and stale), 32
tried variants of SO-GRPO (lower ranges of .02 to .2, lambda of 1 to 30, gates, estimators), 11 GRPO, the rest the
others: the baselines have the settings of their papers or of TRL. Then 24 runs chose `target_kl` (.003, .005, .01)."""
JUDGING_SEEDS = (201, 202, 203, 204, 205)
"""Chose nothing."""
GROUP = 8
"""Trajectories per prompt of the methods without a critic."""


_LONG_WARM_START = WarmStartConfig(
    noise=ExpertNoise(missing_keyword=0.1, wrong_keyword=0.1, half_name=0.05, early_answer=0.05), limits=LONG_LIMITS
)
SHORT = QuestionWorld("Questions", "one hop or two, turns of four tokens")
LONG = QuestionWorld(
    "Long questions", "three hops or four, turns of four tokens", (0.0, 0.0, 0.5, 0.5), LONG_LIMITS, _LONG_WARM_START
)


@dataclass(frozen=True)
class Regime:
    """A way to train, the same for all methods."""

    title: str
    description: str
    learning_rate: float
    """The common one."""
    learning_rates: tuple[float, ...]
    """From which each method chooses its own; none where no method does."""
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

    @property
    def updates(self) -> int:
        """Per rollout."""
        return self.trajectories // self.minibatch * self.epochs


REGIMES = {
    "gentle": Regime(
        "Gentle",
        "8 updates per rollout at a moderate learning rate",
        learning_rate=3e-4,
        learning_rates=(),
        trajectories=128,
        minibatch=32,
        rollouts=15,
    ),
    "reuse": Regime(
        "Reuse",
        "32 updates per rollout",
        learning_rate=1e-3,
        learning_rates=(1e-4, 3e-4, 1e-3),
        epochs=8,
        rollouts=12,
    ),
    "stale": Regime(
        "Stale",
        "8 updates per rollout, each up to 6 rollouts late",
        learning_rate=1e-3,
        learning_rates=(1e-4, 3e-4, 1e-3),
        rollouts=32,
        staleness=6,
    ),
    "hot": Regime(
        "Hot",
        "as gentle, at a high learning rate",
        learning_rate=2e-3,
        learning_rates=(),
        trajectories=128,
        minibatch=32,
        rollouts=15,
    ),
    "long": Regime(
        "Long",
        "questions of 3 or 4 hops, 32 updates per rollout",
        learning_rate=5e-4,
        learning_rates=(5e-5, 1.5e-4, 5e-4),
        epochs=8,
        rollouts=12,
        world=LONG,
    ),
}


@dataclass(frozen=True)
class Method:
    """`trainer` is "trl" (`trl.GRPOTrainer` as it is), "so_grpo" or "so_ppo"; `settings` are fields of its config."""

    title: str
    trainer: str
    description: str
    settings: dict[str, Any]
    tuned: bool = True
    """Whether its own learning rate is looked for; not that of a control."""

    @property
    def family(self) -> str:
        return "ppo" if self.trainer == "so_ppo" else "grpo"


_SYMMETRIC = {"epsilon": 0.2, "epsilon_high": 0.2}
_NARROW = {"epsilon": 0.05, "epsilon_high": 0.2}
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
)
_TURN_METHODS = _methods(
    "so_grpo",
    ("so_grpo_specified", "SO-GRPO as specified", "the note's form, without our additions", _SPECIFIED),
    ("st_grpo", "ST-GRPO", "turn ratios, bias norm: ST-PPO without a critic", _ST),
    ("turn_geometric", "turn, geometric", "turn ratios alone", _SYMMETRIC | _TURN | _NONE),
    ("turn_arithmetic", "turn, arithmetic", "the note's ratios alone", _SYMMETRIC | _TURN | _NONE | _ARITHMETIC),
    ("s_grpo", "S-GRPO", "token ratios and the penalty", _SYMMETRIC | _TOKEN | _PENALTY),
    ("so_grpo", "SO-GRPO, our defaults", "turn ratios, penalty; ours: lower range .05, target KL", _SO | _TARGET),
    ("so_grpo_fixed", "SO-GRPO, narrow", "our defaults without a target KL", _SO),
    ("so_grpo_arithmetic", "SO-GRPO, narrow, arithmetic", "the note's ratios, our lower range", _SO | _ARITHMETIC),
    ("sequence_penalty", "GSPO + penalty", "SO-GRPO, narrow, with sequence ratios", _NARROW | _SEQUENCE | _PENALTY),
    ("kl_control", "turn + plain KL", "SO-GRPO, narrow, whose penalty has no gate", _SO | _PLAIN_KL),
)
_CRITIC_METHODS = _methods(
    "so_ppo",
    ("ppo", "PPO", "token ratios, token GAE", _SYMMETRIC | _PPO),
    ("turn_ppo", "Turn-PPO", "turn ratios, token GAE", _SYMMETRIC | _TURN | _TOKEN_PPO | _NONE),
    ("s_ppo", "S-PPO", "token ratios, token GAE, bias norm", _SYMMETRIC | _TOKEN | _TOKEN_PPO | _BIAS_NORM),
    ("st_ppo", "ST-PPO", "turn ratios, token GAE, bias norm", _ST | _TOKEN_PPO),
    ("so_ppo_specified", "SO-PPO as specified", "the note's form, without our additions", _SPECIFIED),
    ("so_ppo", "SO-PPO, our defaults", "turn ratios, penalty; ours: lower range .05, target KL", _SO | _TARGET),
    ("so_ppo_fixed", "SO-PPO, narrow", "our defaults without a target KL", _SO),
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
_ALL = _TRL_METHODS | _TURN_METHODS | _CRITIC_METHODS | _CONTROLS
METHODS = dict(sorted(_ALL.items(), key=lambda item: item[1].family))
COMMON_LEARNING_RATE = {name: regime.learning_rate for name, regime in REGIMES.items()}
