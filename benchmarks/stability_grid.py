"""Where and how long the stability benchmark trains: regimes, learning rates and seeds.

Regimes and the definition of a collapse were fixed before the judging seeds were run.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.worlds import Apprenticeship, BenchmarkWorld, HuntWorld, QuestionWorld
from sorl_trl.sandbox import LONG_LIMITS, ExpertNoise, PolicyConfig, WarmStartConfig

CHOOSING_SEEDS = (101, 102)
"""Chose every setting, with a few runs of seed 91: learning rates, coefficients, clip ranges, the regimes' settings.
In no table of results. Of about 60 runs that looked for settings (one or two seeds, reuse, long, hot and stale), 32
tried variants of SO-GRPO (lower ranges of .02 to .2, lambda of 1 to 30, gates, estimators), 11 GRPO, the rest the
others: the baselines have the settings of their papers or of TRL. Then 24 runs chose `target_kl` (.003, .005, .01)."""
JUDGING_SEEDS = (201, 202, 203, 204, 205)
"""Chose nothing."""
_LONG_WARM_START = WarmStartConfig(
    noise=ExpertNoise(missing_keyword=0.1, wrong_keyword=0.1, half_name=0.05, early_answer=0.05), limits=LONG_LIMITS
)
SHORT = QuestionWorld("Questions", "one hop or two, turns of four tokens")
LONG = QuestionWorld(
    "Long questions", "three hops or four, turns of four tokens", (0.0, 0.0, 0.5, 0.5), LONG_LIMITS, _LONG_WARM_START
)
HUNT = HuntWorld("Hunts", "a game of up to 8 turns of seven tokens, with an answer after each")
HUNT_LARGE = HuntWorld(
    "Hunts, larger policy",
    "the same with a policy of 2.6 million parameters",
    apprenticeship=Apprenticeship(PolicyConfig(256, 3, 8), learning_rate=1e-3),
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
    "hunt-gentle": Regime(
        "Hunts, gentle",
        "8 updates per rollout",
        learning_rate=3e-4,
        learning_rates=(3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
        trajectories=128,
        minibatch=32,
        rollouts=15,
        world=HUNT,
    ),
    "hunt-reuse": Regime(
        "Hunts, reuse",
        "32 updates per rollout",
        learning_rate=1e-3,
        learning_rates=(3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
        epochs=8,
        rollouts=15,
        world=HUNT,
    ),
    "hunt-stale": Regime(
        "Hunts, stale",
        "8 updates per rollout, each up to 6 rollouts late",
        learning_rate=1e-3,
        learning_rates=(3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
        rollouts=32,
        staleness=6,
        world=HUNT,
    ),
    "hunt-large": Regime(
        "Hunts, larger policy",
        "2.6 million parameters, 32 updates per rollout",
        learning_rate=3e-4,
        learning_rates=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
        epochs=8,
        rollouts=12,
        world=HUNT_LARGE,
    ),
}
COMMON_LEARNING_RATE = {name: regime.learning_rate for name, regime in REGIMES.items()}
