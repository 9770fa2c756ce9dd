"""Where and how long the stability benchmark trains: regimes, learning rates and seeds.

Regimes and the definition of a collapse were fixed before the judging seeds were run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.other_methods import IN_TIME, OF_QUESTIONS, OTHER_METHODS
from benchmarks.stability_methods import METHODS
from benchmarks.worlds import Apprenticeship, BenchmarkWorld, HuntWorld, QuestionWorld, WorkingWorld
from sorl_trl.sandbox import LONG_LIMITS, ExpertNoise, PolicyConfig, WarmStartConfig

CHOOSING_SEEDS = (101, 102)
"""Chose every setting, with a few runs of seed 91: learning rates, coefficients, clip ranges, the regimes' settings.
In no table of results. Of about 60 runs that looked for settings (one or two seeds, reuse, long, hot and stale), 32
tried variants of SO-GRPO (lower ranges of .02 to .2, lambda of 1 to 30, gates, estimators), 11 GRPO, the rest the
others: the baselines have the settings of their papers or of TRL. Then 24 runs chose `target_kl` (.003, .005, .01)."""
JUDGING_SEEDS = (201, 202, 203, 204, 205, 206, 207, 208)
"""Chose no setting of a method. Eight, so that a paired test can speak; the first runs were of the first five. Which
method became our defaults was decided with those of questions and of `hunt-reuse` in view."""
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
WORKING = WorkingWorld("Working", "three hops, turns of 40 tokens that compare and copy what was found")
"""The policy of seed 101 starts at sampled EM .44 and greedy EM 1.0, after 88 CPU seconds of imitation, and GRPO takes
it to .73 in `working-gentle`. What is left to be learnt is to be sure."""
LARGE = WorkingWorld(
    "Working, larger policy",
    "the same with a policy ten times as large",
    verbosity=20,
    policy=PolicyConfig(192, 6, 6),
    practice=(4000, 600),
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
    methods: tuple[str, ...] = ()
    """The methods that are run in it, by name; none named: all."""

    @property
    def updates(self) -> int:
        """Per rollout."""
        return self.trajectories // self.minibatch * self.epochs


RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
"""Two steps of three on either side of a moderate one, so that what is chosen is not at an end."""
CORE = (
    *("grpo", "gspo", "gspo_authors", "gspo_length", "turn_geometric", "turn_sqrt", "so_grpo_specified"),
    *("so_grpo", "so_grpo_turn", "so_grpo_penalty", "so_grpo_first", "so_grpo_fixed", "grpo_target"),
    *("so_middle", "turn_middle", "turn_of_tokens"),
    *("ppo", "so_ppo_specified", "so_ppo", "so_ppo_first", "so_ppo_turn", "so_ppo_fixed", "ppo_target"),
    *(name for name in OTHER_METHODS if name not in OF_QUESTIONS),
)
"""The methods of the worlds whose runs are dear."""


def _without_those_in_time(methods: Iterable[str]) -> tuple[str, ...]:
    """What can be trained on late rollouts."""
    return tuple(name for name in methods if name not in IN_TIME)


SMALL = {"rollouts": 16}
"""Gentle with the trajectories of every regime, for worlds whose runs are dear."""


def _regimes_of(
    name: str,
    world: BenchmarkWorld,
    gentle: Mapping[str, int] = SMALL,
    reuse: int = 12,
    stale: int = 24,
    stress_rate: float = 1e-3,
) -> dict[str, Regime]:
    """Gentle, reuse and stale in a world of its own, as `<name>-gentle` and so on.

    Args:
        name: how their names begin.
        world: in which they train.
        gentle: what a gentle rollout holds, and how many there are.
        reuse: rollouts of reuse.
        stale: rollouts of stale.
        stress_rate: the common learning rate of reuse and stale.
    """
    common: dict[str, Any] = {"learning_rates": RATES, "world": world, "methods": CORE}
    kinds = {
        "gentle": Regime(
            f"{world.title}, gentle", "8 updates per rollout at a moderate rate", 3e-4, **gentle, **common
        ),
        "reuse": Regime(
            f"{world.title}, reuse", "32 updates per rollout", stress_rate, epochs=8, rollouts=reuse, **common
        ),
        "stale": Regime(
            f"{world.title}, stale",
            "8 updates per rollout, each up to 6 rollouts late",
            stress_rate,
            rollouts=stale,
            staleness=6,
            **common | {"methods": _without_those_in_time(CORE)},
        ),
    }
    return {f"{name}-{kind}": regime for kind, regime in kinds.items()}


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
        methods=_without_those_in_time(METHODS),
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
    **_regimes_of("hunt", HUNT, {"trajectories": 128, "minibatch": 32, "rollouts": 15}, reuse=15, stale=32),
    "hunt-large": Regime(
        "Hunts, larger policy",
        "2.6 million parameters, 32 updates per rollout",
        learning_rate=3e-4,
        learning_rates=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
        epochs=8,
        rollouts=12,
        world=HUNT_LARGE,
        methods=CORE,
    ),
    **_regimes_of("working", WORKING, stress_rate=3e-4),
    **_regimes_of("working-large", LARGE, stress_rate=3e-4),
}
COMMON_LEARNING_RATE = {name: regime.learning_rate for name, regime in REGIMES.items()}
